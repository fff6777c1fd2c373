"""Annotations for handler arguments that FastStream provides."""

from typing import Annotated

from faststream._internal.context import Context
from faststream.annotations import ContextRepo, Logger
from faststream.params import NoCast

from cometmq.integrations.faststream.broker import CometMQBroker as _Broker
from cometmq.integrations.faststream.message import CometMQMessage as _Message

__all__ = ["CometMQBroker", "CometMQMessage", "ContextRepo", "Logger", "NoCast"]

CometMQMessage = Annotated[_Message, Context("message")]
CometMQBroker = Annotated[_Broker, Context("broker")]
