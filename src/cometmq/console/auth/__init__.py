"""Access to the console: accounts, sessions and the audit log. Independent of the web framework."""
