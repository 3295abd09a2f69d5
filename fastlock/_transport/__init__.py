"""How bytes travel and how threads and tasks wait: connections, reconnects, settings. No decisions about locks."""
