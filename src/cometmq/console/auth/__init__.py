"""Access to the console, independent of the web framework: accounts, sessions, the audit log."""
