"""What all rooms of the console use: texts, feeds, questions to brokers, the list of clusters."""
