"""What stands before the pages, and knows nothing of the framework: accounts, sessions, the audit log."""
