"""Access control: accounts, their permissions, and the check of each request (docs/security.md, Access)."""

from cometmq.protocol.codes import RequestCode, ResponseCode

# The requests about access control, and the code with which a broker without access control refuses each.
REFUSALS = {
    RequestCode.UPDATE_AND_CREATE_ACL_CONFIG: ResponseCode.UPDATE_AND_CREATE_ACL_CONFIG_FAILED,
    RequestCode.DELETE_ACL_CONFIG: ResponseCode.DELETE_ACL_CONFIG_FAILED,
    RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: ResponseCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED,
    RequestCode.GET_BROKER_CLUSTER_ACL_INFO: ResponseCode.SYSTEM_ERROR,
    RequestCode.LIST_ACCOUNTS: ResponseCode.SYSTEM_ERROR,
    RequestCode.EXPLAIN_ACCESS: ResponseCode.SYSTEM_ERROR,
}
