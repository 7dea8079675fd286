"""One adapter per wire protocol, each a thin shell over `session`."""
