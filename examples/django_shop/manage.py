"""A Django project with one management command that consumes orders.

Start a cluster first (`cometmq standalone`), then in examples/django_shop:
python manage.py migrate --run-syncdb && python manage.py consume_orders
"""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
    execute_from_command_line(sys.argv)
