#!/bin/sh
# The command cometmq-single of the image: runs a name server and a broker in one container, for tests and trials.
# Its arguments are settings of the broker:
#   podman run -p 9876:9876 -p 10911:10911 -p 8081:8081 cometmq cometmq-single autoCreateTopicEnable=false
set -eu
umask 077
cp /etc/cometmq/* /run/cometmq/
cd /run/cometmq
# The file sizes of `cometmq standalone`. The defaults would reserve a gigabyte.
printf '%s\n' namesrvAddr=127.0.0.1:9876 mappedFileSizeCommitLog=67108864 mappedFileSizeConsumeQueue=60000 \
    maxHashSlotNum=50000 maxIndexNum=200000 "$@" >> broker.conf
printf '%s\n' kvConfigPath=/var/lib/cometmq/kvConfig.json > namesrv.conf
mqnamesrv -c namesrv.conf &
# A broker that starts before the name server would register only half a minute later.
until python -c 'import socket; socket.create_connection(("127.0.0.1", 9876), 1)' 2>/dev/null; do sleep 0.1; done
exec mqbroker -c broker.conf
