"""As little as a Django project needs."""

import os
from pathlib import Path

INSTALLED_APPS = ["shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SHOP_DATABASE = os.environ.get("SHOP_DATABASE", str(Path(__file__).parents[1] / "shop.sqlite3"))
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": SHOP_DATABASE,
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
}
NAMESRV_ADDR = os.environ.get("NAMESRV_ADDR", "127.0.0.1:9876")
