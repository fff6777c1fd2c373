"""`python manage.py consume_orders`: a worker that puts orders into the database until it is told to stop."""

import signal
import threading
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import close_old_connections

from cometmq import ConsumeFromWhere, MessageExt, PushOptions, SyncPushConsumer
from shop.models import Order


class Command(BaseCommand):
    """Ends on SIGTERM and Ctrl-C: what is being handled is finished, and offsets are stored."""

    help = "Consume orders into the database."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--count", type=int, help="end after so many orders")

    def handle(self, *, count: int | None, **_: Any) -> None:
        stop = threading.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: stop.set())

        def listener(messages: list[MessageExt]) -> None:
            # Called in threads, each with a connection of its own to the database. An exception is a retry.
            close_old_connections()
            try:
                for message in messages:
                    # The message may come again: the row and the mark that it was handled are one.
                    Order.objects.get_or_create(
                        msg_id=message.msg_id, defaults={"text": message.body.decode()}
                    )
                if count is not None and Order.objects.count() >= count:
                    stop.set()
            finally:
                close_old_connections()

        how = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, consume_concurrency=4)
        with SyncPushConsumer("django-shop", listener, "Orders", namesrv=settings.NAMESRV_ADDR, options=how):
            self.stdout.write("consuming; Ctrl-C ends it")
            stop.wait()
        self.stdout.write(f"{Order.objects.count()} orders")
