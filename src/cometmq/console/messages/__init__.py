"""The pages about messages: search, one message, traces, dead letters, timers, transactions."""
