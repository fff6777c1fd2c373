"""All JSON bodies by name, in one place to import from: `X.decode(body)` reads, `x.encode()` writes."""

from __future__ import annotations

from cometmq.protocol.bodies_admin import (
    BrokerConsumeStats,
    BrokerStatsData,
    BrokerStatsItem,
    ClientConnection,
    ConsumeQueueData,
    ConsumerConnection,
    ConsumerOffsetTable,
    ConsumeStats,
    ConsumeTimeSpan,
    DelayOffsetTable,
    GroupList,
    OffsetWrapper,
    ProducerConnection,
    ProducerInfo,
    ProducerTableInfo,
    QueryConsumeQueueBody,
    QueryConsumeTimeSpanBody,
    QueryCorrectionOffsetBody,
    TopicOffset,
    TopicStatsTable,
)
from cometmq.protocol.bodies_client import (
    CheckClientRequestBody,
    ConsumeMessageDirectlyResult,
    ConsumerData,
    ConsumerList,
    ConsumerRunningInfo,
    ConsumeStatus,
    GetConsumerStatusBody,
    HeartbeatData,
    LockBatchBody,
    LockBatchResult,
    OffsetMovedEvent,
    ProcessQueueInfo,
    ProducerData,
    ResetOffsetBody,
    SubscriptionData,
)
from cometmq.protocol.bodies_route import (
    BrokerData,
    BrokerMemberGroup,
    ClusterInfo,
    DataVersion,
    KVTable,
    QueueData,
    RegisterBrokerBody,
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
    TopicConfig,
    TopicConfigTable,
    TopicList,
    TopicRouteData,
)
from cometmq.protocol.json_body import Body

__all__ = [
    "Body", "BrokerConsumeStats", "BrokerData", "BrokerMemberGroup", "BrokerStatsData", "BrokerStatsItem",
    "CheckClientRequestBody", "ClientConnection", "ClusterInfo", "ConsumeMessageDirectlyResult",
    "ConsumeQueueData", "ConsumeStats", "ConsumeStatus", "ConsumeTimeSpan", "ConsumerConnection",
    "ConsumerData", "ConsumerList", "ConsumerOffsetTable", "ConsumerRunningInfo", "DataVersion",
    "DelayOffsetTable", "GetConsumerStatusBody", "GroupList", "HeartbeatData", "KVTable", "LockBatchBody",
    "LockBatchResult", "OffsetMovedEvent", "OffsetWrapper", "ProcessQueueInfo", "ProducerConnection",
    "ProducerData", "ProducerInfo", "ProducerTableInfo", "QueryConsumeQueueBody", "QueryConsumeTimeSpanBody",
    "QueryCorrectionOffsetBody", "QueueData", "RegisterBrokerBody", "ResetOffsetBody", "SubscriptionData",
    "SubscriptionGroupConfig", "SubscriptionGroupTable", "TopicConfig", "TopicConfigTable", "TopicList",
    "TopicOffset", "TopicRouteData", "TopicStatsTable",
]  # fmt: skip
