"""Settings of Apache's broker that CometMQ accepts, but that have no effect."""

from __future__ import annotations

from cometmq.settings import Inert

# These settings, with 4.9.7's defaults, control parts of Apache's broker that CometMQ does not have: thread
# pools and their queues, Netty, mapped memory, and the deletion of mapped files (docs/reference/storage.md,
# Broker settings).
WITHOUT_USE = {
    "sendMessageThreadPoolNums": "4", "pullMessageThreadPoolNums": "32", "queryMessageThreadPoolNums": "16",
    "adminBrokerThreadPoolNums": "16", "clientManageThreadPoolNums": "32",
    "consumerManageThreadPoolNums": "32", "heartbeatThreadPoolNums": "8",
    "endTransactionThreadPoolNums": "24", "processReplyMessageThreadPoolNums": "32",
    "putMessageFutureThreadPoolNums": "4", "litePullMessageThreadPoolNums": "32",
    "ackMessageThreadPoolNums": "32", "sendThreadPoolQueueCapacity": "10000",
    "putThreadPoolQueueCapacity": "10000", "pullThreadPoolQueueCapacity": "100000",
    "replyThreadPoolQueueCapacity": "10000", "queryThreadPoolQueueCapacity": "20000",
    "clientManagerThreadPoolQueueCapacity": "1000000", "consumerManagerThreadPoolQueueCapacity": "1000000",
    "heartbeatThreadPoolQueueCapacity": "50000", "endTransactionPoolQueueCapacity": "100000",
    "transferMsgByHeap": "true",
    "serverWorkerThreads": "8",
    "serverCallbackExecutorThreads": "0", "serverSelectorThreads": "3", "serverOnewaySemaphoreValue": "256",
    "serverAsyncSemaphoreValue": "64", "serverSocketSndBufSize": "0", "serverSocketRcvBufSize": "0",
    "serverPooledByteBufAllocatorEnable": "true", "useEpollNativeSelector": "false",
    "clientWorkerThreads": "4", "clientCloseSocketIfTimeout": "false", "highSpeedMode": "false",
    "commercialEnable": "true", "commercialBigCount": "1", "commercialTimerCount": "1",
    "commercialTransCount": "1", "commercialBaseCount": "1",
    "skipUncommittedMessage": "false", "forceRegister": "true",
    "flushConsumerOffsetHistoryInterval": "60000", "flushConsumeQueueLeastPages": "2",
    "useReentrantLockWhenPutMessage": "true", "transientStorePoolEnable": "false",
    "transientStorePoolSize": "5", "fastFailIfNoBufferInStorePool": "false", "warmMapedFileEnable": "false",
    "flushLeastPagesWhenWarmMapedFile": "4096", "commitIntervalCommitLog": "200",
    "commitCommitLogLeastPages": "4", "commitCommitLogThoroughInterval": "200",
    "destroyMapedFileIntervalForcibly": "120000", "redeleteHangedFileInterval": "120000",
    "diskFallRecorded": "true", "mappedFileSizeConsumeQueueExt": "50331648",
    "bitMapLengthConsumeQueueExt": "64",
    "enableScheduleAsyncDeliver": "false", "scheduleAsyncDeliverMaxPendingLimit": "2000",
    "scheduleAsyncDeliverMaxResendNum2Blocked": "3", "debugLockEnable": "false",
    "putMsgIndexHightWater": "600000", "expectConsumerNumUseFilter": "32",
    "maxErrorRateOfBloomFilter": "20", "filterDataCleanTimeSpan": "86400000",
    "autoDeleteUnusedStats": "false",
    # Release 5.x of Apache's broker has added the following settings.
    "waitTimeMillsInAckQueue": "3000", "waitTimeMillsInAdminBrokerQueue": "5000",
    "timerRollWindowSlot": "172800", "timerFlushIntervalMs": "1000", "mappedFileSizeTimerLog": "104857600",
    "appendTopicForTimerDeleteKey": "false",
    "transactionOpMsgMaxSize": "4096", "transactionOpBatchInterval": "3000",
}  # fmt: skip

NOT_BUILT = {
    "enableConsumeQueueExt": "false", "duplicationEnable": "false",
    "enableLmq": "false", "enableMultiDispatch": "false", "messageStorePlugIn": "",
    "enableCalcFilterBitMap": "false", "filterSupportRetry": "false",
    "timerPrecisionMs": "1000", "timerCongestNumEachSlot": "2147483647",
}  # fmt: skip

INERT = Inert(WITHOUT_USE, NOT_BUILT)
WITHOUT_EFFECT = frozenset({*INERT.defaults, "enableBatchPush"})
