"""All pages of the console."""

from __future__ import annotations

from cometmq.console.messages import dead, dead_group, message, search, timers, trace, transactions
from cometmq.console.pages import (
    access,
    brokers,
    group,
    groups,
    jobs,
    name_servers,
    overview,
    topic,
    topics,
    users,
)

PAGES = (
    *(overview.overview_page, brokers.brokers_page, brokers.broker_page),
    *(name_servers.name_servers_page, name_servers.name_server_page),
    *(topics.topics_page, topic.topic_page, groups.groups_page, group.group_page, groups.producers_page),
    *(search.search_page, message.message_page, trace.trace_page),
    *(dead.dead_letters_page, dead_group.dead_letters_of_group_page),
    *(timers.timers_page, transactions.transactions_page),
    *(access.access_page, jobs.jobs_page, jobs.job_page, users.users_page),
)
"""All pages, in the order in which the framework compares their paths with an address.

If the paths of two pages match the same address, the page with the more specific path must come first.
"""
