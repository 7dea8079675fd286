"""Clients of the server. Importing this loads nothing."""
