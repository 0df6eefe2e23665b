// The part of UCX's interface (1.10 and newer) that is used here.
#ifndef MOESAIC_UCX_CALLS_H
#define MOESAIC_UCX_CALLS_H

#include <stddef.h>
#include <stdint.h>

enum { WITH_CALLBACK = 1 << 1, WITH_DATA = 1 << 2 };  // fields that are given

struct ucp_tag_info {
    uint64_t tag;
    size_t length;
};

typedef void ucp_sent_function(void *request, signed char status, void *data);
typedef void ucp_received_function(void *request, signed char status,
                                   const struct ucp_tag_info *info, void *data);

struct ucp_param {
    uint32_t mask, flags;
    void *request;
    union {
        ucp_sent_function *send;
        ucp_received_function *receive;
    } callback;
    uint64_t datatype;
    void *data;
    void *others[8];  // whatever may follow; the mask says that it is not there
};

typedef unsigned ucp_progress_function(void *worker);
typedef signed char ucp_arm_function(void *worker);
typedef void *ucp_probe_function(void *worker, uint64_t tag, uint64_t mask, int remove,
                                 struct ucp_tag_info *info);
typedef void *ucp_receive_function(void *worker, void *buffer, size_t count, void *message,
                                   const struct ucp_param *param);
typedef void *ucp_send_function(void *endpoint, const void *buffer, size_t count, uint64_t tag,
                                const struct ucp_param *param);
typedef void ucp_free_function(void *request);

// Else the transfer has ended at once, with 0 or a negative status.
#define IS_REQUEST(pointer) ((uintptr_t)(pointer) - 1 < (uintptr_t)(-100) - 1)

#endif
