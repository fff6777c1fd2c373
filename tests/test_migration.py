"""The migration page lists all names of the other clients, and the names of ours on it exist.

The names are those of the public modules of the wheels on PyPI (rocketmq 0.4.4: client.py, exceptions.py;
rocketmq-python-client 5.1.2: the exports of its packages, without its internal parts), of the source of
rocketmq-client-python, and the parameters of Java's classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import cometmq

PAGE = (Path(__file__).parents[1] / "docs/migration-clients.md").read_text()

NAMES = {
    "rocketmq": """
        Message set_keys set_tags set_body set_property set_delay_time_level
        RecvMessage topic tags keys body id delay_time_level queue_id reconsume_times store_size
        born_timestamp store_timestamp queue_offset commit_log_offset prepared_transaction_offset get_property
        SendStatus OK FLUSH_DISK_TIMEOUT FLUSH_SLAVE_TIMEOUT SLAVE_NOT_AVAILABLE SendResult
        Producer send_batch send_sync send_async send_oneway send_oneway_orderly send_orderly set_group
        set_namesrv_addr set_namesrv_domain set_session_credentials set_timeout set_compress_level
        set_max_message_size start shutdown hashing_queue_selector
        PushConsumer MessageModel set_message_model subscribe set_thread_count set_message_batch_max_size
        set_instance_name
        PullConsumer pull get_message_queue_offset set_message_queue_offset
        RocketMQException NullPointerException MallocFailed ProducerException ProducerStartFailed
        ProducerSendSyncFailed ProducerSendOnewayFailed ProducerSendOrderlyFailed ProducerSendAsyncFailed
        ConsumerException PushConsumerStartFailed PullConsumerStartFailed PullConsumerFetchMQFailed
        PullConsumerFetchMessageFailed""",
    "rocketmq-client-python": """
        SendStatus TransactionStatus COMMIT ROLLBACK UNKNOWN ConsumeStatus CONSUME_SUCCESS RECONSUME_LATER
        Message ReceivedMessage MessageProperty get_property Producer orderly send_orderly_with_sharding_key
        set_group
        set_name_server_address set_name_server_domain set_session_credentials set_timeout set_compress_level
        set_max_message_size TransactionMQProducer checker_callback send_message_in_transaction local_execute
        PushConsumer set_message_model set_thread_count set_message_batch_max_size set_instance_name""",
    "rocketmq-python-client": """
        ClientConfiguration Credentials endpoints namespace request_timeout
        Producer startup shutdown send send_async recall_message recall_message_async begin_transaction
        Transaction commit rollback TransactionChecker TransactionResolution check SendReceipt message_id
        transaction_id message_queue offset recall_handle
        Message body tag keys add_property message_group delivery_timestamp priority lite_topic born_host
        born_timestamp delivery_attempt
        PushConsumer MessageListener consume ConsumeResult FilterExpression FilterType LitePushConsumer
        SimpleConsumer LiteSimpleConsumer receive receive_async ack ack_async change_invisible_duration
        change_invisible_duration_async await_duration subscribe unsubscribe
        ClientException BadRequestException UnauthorizedException PaymentRequiredException ForbiddenException
        NotFoundException PayloadTooLargeException PayloadEmptyException TooManyRequestsException
        LiteSubscriptionQuotaExceededException LiteTopicQuotaExceededException
        RequestHeaderFieldsTooLargeException InternalErrorException ProxyTimeoutException UnsupportedException
        IllegalArgumentException IllegalStateException""",
    "Java's clients": """
        namesrvAddr clientIP instanceName namespace namespaceV2 pollNameServerInterval heartbeatBrokerInterval
        persistConsumerOffsetInterval pullTimeDelayMillsWhenException unitName vipChannelEnabled useTLS
        mqClientApiTimeout enableTrace traceTopic enableMsgTrace customizedTraceTopic
        createTopicKey defaultTopicQueueNums sendMsgTimeout compressMsgBodyOverHowmuch compressLevel
        compressType retryTimesWhenSendFailed retryTimesWhenSendAsyncFailed retryAnotherBrokerWhenNotStoreOK
        maxMessageSize addRetryResponseCode sendLatencyFaultEnable sendMsgMaxTimeoutPerRequest
        backPressureForAsyncSendNum checkThreadPoolMinSize checkThreadPoolMaxSize
        checkRequestHoldMax recallMessage
        messageModel consumeFromWhere consumeTimestamp allocateMessageQueueStrategy consumeThreadMin
        consumeThreadMax adjustThreadPoolNumsThreshold consumeConcurrentlyMaxSpan pullThresholdForQueue
        pullThresholdSizeForQueue pullThresholdForTopic pullThresholdSizeForTopic pullInterval
        consumeMessageBatchMaxSize pullBatchSize postSubscriptionWhenPull maxReconsumeTimes consumeTimeout
        suspendCurrentQueueTimeMillis awaitTerminationMillisWhenShutdown messageQueueListener offsetStore
        brokerSuspendMaxTimeMillis consumerTimeoutMillisWhenSuspend consumerPullTimeoutMillis autoCommit
        autoCommitIntervalMillis pullThreadNums pullThresholdForAll topicMetadataCheckIntervalMillis
        createTopic viewMessage queryMessage searchOffset minOffset maxOffset earliestMsgStoreTime
        sendMessageBack updateCorePoolSize suspend resume seek seekToBegin seekToEnd offsetForTimestamp
        pause committed commit commitSync fetchConsumeOffset updateConsumeOffset
        MQPullConsumerScheduleService
        sendOneway sendCallback tranExecuter clientCallbackExecutorThreads setCallbackExecutor
        setAsyncSenderExecutor DEFAULT_PRODUCER DEFAULT_CONSUMER setNamesrvAddr setTopic setBody null""",
}


@pytest.mark.parametrize("package", NAMES)
def test_the_page_names_everything_of_the_other_client(package: str) -> None:
    def section_of(name: str) -> str:
        (found,) = re.findall(rf"^## From {name}(?: [\d.]+)?\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
        return str(found)

    section = section_of(package)
    if section.lstrip().startswith("As above"):
        section += section_of("rocketmq")
    code = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", section))))
    assert [name for name in NAMES[package].split() if name not in code] == []
    assert "not there yet" not in section


CLASSES = (
    "ClientOptions FlowLimits Message Producer ProducerOptions PullConsumer PullOptions "
    "PushConsumer PushOptions SimpleConsumer SimpleOptions TraceOptions TransactionProducer"
)


@pytest.mark.parametrize("name", CLASSES.split())
def test_what_the_page_names_here_exists(name: str) -> None:
    here = getattr(cometmq, name)
    parameters = set(inspect.signature(here).parameters)
    if dataclasses.is_dataclass(here):
        parameters |= {field.name for field in dataclasses.fields(here)}
    # The last column of each table contains our names.
    columns = " ".join(line.rsplit(" | ", 1)[-1] for line in PAGE.splitlines() if line.startswith("|"))
    calls = re.findall(rf"\b{name}\(((?:[^()]|\([^()]*\))*)\)", columns)
    assert calls
    for call in calls:
        given = re.sub(r"\([^()]*\)|\{[^{}]*\}", "", call)
        assert set(re.findall(r"(\w+)=", given)) <= parameters, call


def test_the_methods_the_page_names_here_exist() -> None:
    owners = [value for name in cometmq.__all__ if inspect.isclass(value := getattr(cometmq, name))]
    methods = {name for owner in owners for name in dir(owner)}
    columns = [line.rsplit(" | ", 1)[-1] for line in PAGE.splitlines() if line.startswith("|")]
    called = set(re.findall(r"await (?:\w+\.)?(\w+)\(", " ".join(columns)))
    assert len(called) > 10
    assert called - methods == set()
