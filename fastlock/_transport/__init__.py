"""The transports: how bytes travel and how threads and tasks wait; connections, reconnects, settings. Never here:
decisions about locks."""
