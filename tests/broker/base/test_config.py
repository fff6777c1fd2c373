"""The broker's settings: RocketMQ's keys and defaults, and the errors for invalid values."""

from __future__ import annotations

import logging

import pytest

from cometmq.broker.base.config import FIELD_OF_KEY, RANGES, STORE_KEYS, BrokerConfig
from cometmq.errors import ConfigError
from cometmq.store.base.config import RANGES as STORE_RANGES

# Defaults as printed by Apache's 4.9 (docs/reference/storage.md, Broker settings), but with SQL92 filters
# enabled.
DEFAULTS = {
    "listenPort": "10911", "brokerClusterName": "DefaultCluster", "brokerId": "0", "brokerPermission": "6",
    "defaultTopicQueueNums": "8", "autoCreateTopicEnable": "true", "autoCreateSubscriptionGroup": "true",
    "clusterTopicEnable": "true", "brokerTopicEnable": "true", "traceTopicEnable": "false",
    "flushConsumerOffsetInterval": "5000", "longPollingEnable": "true", "shortPollingTimeMills": "1000",
    "notifyConsumerIdsChangedEnable": "true", "slaveReadEnable": "false",
    "disableConsumeIfConsumerReadSlowly": "false", "consumerFallbehindThreshold": "17179869184",
    "startAcceptSendRequestTimeStamp": "0", "registerNameServerPeriod": "30000",
    "registerBrokerTimeoutMills": "6000", "forceRegister": "true", "compressedRegister": "false",
    "rejectTransactionMessage": "false", "transactionTimeOut": "6000", "transactionCheckMax": "15",
    "transactionCheckInterval": "60000", "enablePropertyFilter": "true", "filterSupportRetry": "false",
    "traceOn": "true", "aclEnable": "false", "flushDelayOffsetInterval": "10000",
    "waitTimeMillsInSendQueue": "200",
    "messageDelayLevel": "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h",
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), DEFAULTS.items())
def test_a_default(key, value):
    assert BrokerConfig.from_properties({}).properties()[key] == value


def test_keys_of_broker_store_and_network_share_a_file():
    config = BrokerConfig.from_properties(
        {
            "brokerName": "broker-x",
            "brokerIP1": "10.0.0.1",
            "listenPort": "20911",
            "namesrvAddr": "a:9876; b:9876",
            "flushDiskType": "SYNC_FLUSH",
            "serverWorkerThreads": "16",
            "autoCreateTopicEnable": "FALSE",
        }
    )
    assert (config.broker_name, config.broker_ip1, config.listen_port) == ("broker-x", "10.0.0.1", 20911)
    assert config.namesrv_addresses == ["a:9876", "b:9876"]
    assert config.store.flush_disk_type == "SYNC_FLUSH"
    assert config.auto_create_topic_enable is False
    shown = config.properties()
    assert (shown["serverWorkerThreads"], shown["flushDiskType"]) == ("16", "SYNC_FLUSH")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("listenPort", "port", "whole number"),
        ("listenPort", "70000", "a port"),
        ("brokerId", "-1", "master"),
        ("autoCreateTopicEnable", "yes", "true or false"),
        ("brokerPermission", "9", "2 write, 4 read"),
        ("brokerName", " ", "not blank"),
        ("flushDiskType", "LATER", "SYNC_FLUSH"),
        ("messageDelayLevel", "1s nonsense", "delays"),
        ("maxMessageSize", "4 MiB", "whole number"),
        ("maxMessageSize", "-1", "10 to"),
        ("maxMessageSize", "9", "10 to"),
        ("fileReservedTime", "-1", "0 to"),
        ("deleteFileBatchMax", "0", "1 to"),
        ("deleteWhen", "abc", "hours"),
        ("syncFlushTimeout", "0", "1 to"),
        ("maxTransferCountOnMessageInMemory", "0", "1 to"),
        ("diskMaxUsedSpaceRatio", "500", "0 to 100"),
        ("maxIndexNum", "1", "2 to"),
        ("maxMessageSize", "1_000", "whole number"),
        ("mappedFileSizeCommitLog", "100", "bytes, 1024 to"),
        ("defaultTopicQueueNums", "0", "1 to"),
        ("defaultTopicQueueNums", "1025", "at most maxTopicQueueNums (1024)"),
        ("flushConsumerOffsetInterval", "0", "milliseconds, 10 to"),
        ("cleanResourceInterval", "9" * 400, "milliseconds, 10 to"),
        ("cleanResourceInterval", "9" * 4000, "whole number"),
        ("messageDelayLevel", "", "delays"),
        ("messageDelayLevel", "1s " * 256 + "1s", "at most 256"),
        ("messageDelayLevel", "\u00b2s", "delays"),
        ("messageDelayLevel", "9" * 400 + "d", "delays"),
        ("deleteWhen", "\u00b2", "hours"),
        ("storePathRootDir", "", "a directory"),
        ("storePathRootDir", "a\0b", "control character"),
        ("regionId", "r" * 4097, "at most 4096 characters"),
        ("brokerIP1", "", "an IP address or a host's name"),
        ("brokerIP1", "a b", "an IP address or a host's name"),
        ("brokerIP1", "..", "an IP address or a host's name"),
        ("brokerIP2", "x" * 64, "an IP address or a host's name"),
        ("bindAddress", "[::1]", "an IP address or a host's name"),
        ("brokerClusterName", "../x", "without /"),
        ("brokerName", "..", "without /"),
        ("brokerName", "b" * 128, "at most 127"),
        ("sendMessageThreadPoolNums", "-1", "0 to"),
        ("haListenPort", "ten", "whole number"),
        ("brokerFastFailureEnable", "1", "true or false"),
        ("msgTraceTopicName", "no topic", "the name of a topic"),
    ],
)
def test_a_bad_value_names_the_key_the_value_and_what_is_expected(key, value, expected):
    with pytest.raises(ConfigError) as raised:
        BrokerConfig.from_properties({key: value})
    assert raised.value.key == key
    assert raised.value.value == value.strip() or raised.value.value == value
    assert expected in raised.value.expected
    running = BrokerConfig()
    before = running.properties()
    with pytest.raises(ConfigError):  # a request to a running broker fails, too, and changes nothing
        running.update({"fileReservedTime": "48", key: value})
    assert running.properties() == before


RAFT = {
    "enableDLegerCommitLog": "true",
    "dLegerGroup": "broker-a",
    "dLegerPeers": "n0-10.0.0.1:40911;n1-10.0.0.2:40911; n2-mq3:40911",
    "dLegerSelfId": "n0",
}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("dLegerGroup", "", "a name"),
        ("dLegerSelfId", "zero", "a letter and a number"),
        ("dLegerSelfId", "n3", "a list that contains this member, n3"),
        ("dLegerPeers", "", "a list that contains this member, n0"),
        ("dLegerPeers", "n0-10.0.0.1", "members like n0-host:port"),
        ("dLegerPeers", "n0-10.0.0.1:1;n0-10.0.0.2:1", "different names"),
        ("preferredLeaderId", "n7", "members of dLegerPeers"),
        ("preferredLeaderId", "n1;;n3", "members of dLegerPeers"),
    ],
)
def test_a_raft_member_with_a_setting_that_cannot_work_does_not_start(key, value, expected):
    with pytest.raises(ConfigError, match=expected):
        BrokerConfig.from_properties({**RAFT, key: value})


@pytest.mark.parametrize("more", [{}, {"preferredLeaderId": "n1"}, {"preferredLeaderId": " n2 ;n1; "}])
def test_a_raft_member_may_prefer_some_members(more):
    BrokerConfig.from_properties({**RAFT, **more})


def test_every_number_has_a_range_and_keeps_to_it():
    shown = BrokerConfig().properties()
    numbers = {key for key in (*FIELD_OF_KEY, *STORE_KEYS) if shown[key].lstrip("-").isdigit()}
    assert numbers - {"deleteWhen"} == RANGES.keys() | STORE_RANGES.keys()
    running = BrokerConfig(broker_name="b")
    before = running.properties()
    for key, (low, high, _) in {**RANGES, **STORE_RANGES}.items():
        for value in (low - 1, high + 1):
            for read in (BrokerConfig.from_properties, running.update):
                with pytest.raises(ConfigError, match=f"^{key} = .* {low} to {high}$"):
                    read({key: str(value)})
    assert running.properties() == before


def test_what_is_shown_of_a_broker_is_within_the_ranges():
    BrokerConfig.from_properties(BrokerConfig().properties())


def test_an_unknown_key_is_kept_and_the_nearest_known_one_named(caplog):
    with caplog.at_level(logging.WARNING):
        config = BrokerConfig.from_properties({"autoCreateTopicEnabled": "false", "zzz": "1"})
    assert "autoCreateTopicEnabled (did you mean autoCreateTopicEnable?)" in caplog.text
    assert "unknown setting zzz" in caplog.text
    assert config.properties()["autoCreateTopicEnabled"] == "false"
    assert config.auto_create_topic_enable is True


def test_known_settings_without_effect_here_are_taken_in_silence(caplog):
    with caplog.at_level(logging.WARNING):
        BrokerConfig.from_properties(
            {
                "sendMessageThreadPoolNums": "16", "useEpollNativeSelector": "true",
                # Settings of 5.x whose limits or files do not exist here.
                "waitTimeMillsInAckQueue": "1", "waitTimeMillsInAdminBrokerQueue": "1",
                "timerRollWindowSlot": "1", "timerFlushIntervalMs": "1", "mappedFileSizeTimerLog": "1",
                "appendTopicForTimerDeleteKey": "true",
                "transactionOpMsgMaxSize": "1", "transactionOpBatchInterval": "1",
            }
        )  # fmt: skip
    assert caplog.text == ""


def test_a_setting_whose_feature_is_not_built_is_named_unless_it_is_at_its_default(caplog):
    with caplog.at_level(logging.WARNING):
        BrokerConfig.from_properties({"maxLmqConsumeQueueNum": "20000", "enableLmq": "FALSE"})
        assert caplog.text == ""
        config = BrokerConfig.from_properties({"enableMultiDispatch": "true"})
    assert "enableMultiDispatch=true has no effect" in caplog.text
    assert config.properties()["enableMultiDispatch"] == "true"


@pytest.mark.parametrize(
    ("key", "at_default", "other"),
    [
        ("enableLmq", "FALSE", "true"),
        ("timerPrecisionMs", "1000", "100"),
        ("timerCongestNumEachSlot", "2147483647", "5"),
    ],
)
def test_what_promises_something_is_not_taken_in_silence(caplog, key, at_default, other):
    with caplog.at_level(logging.WARNING):
        BrokerConfig.from_properties({key: at_default})
        assert caplog.text == ""
        BrokerConfig.from_properties({key: other})
    assert f"{key}={other} has no effect" in caplog.text


def test_what_has_no_effect_is_named_in_one_line(caplog):
    given = {"transientStorePoolEnable": "TRUE", "transferMsgByHeap": "true", "highSpeedMode": "true"}
    with caplog.at_level(logging.INFO):
        BrokerConfig.from_properties(given)
    (line,) = [each.getMessage() for each in caplog.records]
    assert line == "settings accepted without effect: transientStorePoolEnable=true, highSpeedMode=true"


def test_a_running_broker_keeps_and_shows_settings_without_effect_too():
    config = BrokerConfig()
    assert config.update({"sendMessageThreadPoolNums": "7", "nobody": "1"}) == ["sendMessageThreadPoolNums"]
    assert config.properties()["sendMessageThreadPoolNums"] == "7"
    assert "nobody" not in config.properties()


def test_the_registration_period_is_clamped():
    for asked, used in ((1, 10_000), (30_000, 30_000), (10**9, 60_000)):
        assert BrokerConfig(register_name_server_period=asked).register_period_ms == used


def test_what_is_shown_can_be_read_back():
    config = BrokerConfig.from_properties(
        {"brokerName": "b", "listenPort": "1", "odd": "x", "maxMessageSize": "99"}
    )
    assert BrokerConfig.from_properties(config.properties()).properties() == config.properties()
    assert "brokerIP1" in FIELD_OF_KEY
