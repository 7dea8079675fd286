"""The server: sessions, engine, protocols. Importing this loads nothing."""
