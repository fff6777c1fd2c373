"""What is kept of orders."""

from django.db import models


class Order(models.Model):
    """An order, and the message that brought it: which is stored once however often it comes."""

    msg_id = models.CharField(max_length=64, unique=True)
    text = models.TextField()
