"""Orders that are announced if, and only if, they are in the database (here SQLite).

Start a cluster first (`cometmq standalone`), then: python examples/transactions.py [127.0.0.1:9876]
"""

import sqlite3
import sys
import threading

from cometmq import Message, MessageExt, NoRouteError, SyncTransactionProducer, TransactionState


class Orders:
    """The order and the id of its message are stored in one transaction of the database."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        self.database.execute("CREATE TABLE orders (price INTEGER CHECK (price > 0), msg_id TEXT UNIQUE)")

    def execute_local_transaction(self, message: MessageExt, price: int) -> TransactionState:
        """Called when the broker has the message, before any consumer sees it."""
        try:
            with self.lock, self.database:
                self.database.execute("INSERT INTO orders VALUES (?, ?)", (price, message.msg_id))
        except sqlite3.IntegrityError:
            return TransactionState.ROLLBACK
        return TransactionState.COMMIT

    def check_local_transaction(self, message: MessageExt) -> TransactionState:
        """Called later, if the broker has not heard how it ended: by a crash of ours, for instance."""
        with self.lock:
            found = self.database.execute(
                "SELECT 1 FROM orders WHERE msg_id = ?", (message.msg_id,)
            ).fetchone()
        return TransactionState.COMMIT if found else TransactionState.ROLLBACK


def main(namesrv: str) -> None:
    with SyncTransactionProducer("order-desk", Orders(), topics=["Announced"], namesrv=namesrv) as producer:
        for price in (30, -1, 12):
            result = producer.send_in_transaction(Message("Announced", b"order for %d" % price), price)
            print(f"order for {price}: {result.state.name}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876")
    except NoRouteError as error:
        sys.exit(str(error))
