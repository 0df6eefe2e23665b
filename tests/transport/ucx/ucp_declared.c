// Compiles if exchange/ucx_calls.h says of libucp what UCX's own headers say.
#include <stddef.h>
#include <ucp/api/ucp.h>

#include "exchange/ucx_calls.h"

#define SAME(ours, theirs)                                                                  \
    _Static_assert(offsetof(struct ucp_param, ours) == offsetof(ucp_request_param_t, theirs) && \
                       sizeof(((struct ucp_param *)0)->ours) ==                             \
                           sizeof(((ucp_request_param_t *)0)->theirs),                      \
                   #ours)
SAME(mask, op_attr_mask);
SAME(flags, flags);
SAME(request, request);
SAME(callback, cb);
SAME(datatype, datatype);
SAME(data, user_data);
_Static_assert(sizeof(struct ucp_param) >= sizeof(ucp_request_param_t), "room for what may follow");
_Static_assert((int)WITH_CALLBACK == UCP_OP_ATTR_FIELD_CALLBACK, "callback");
_Static_assert((int)WITH_DATA == UCP_OP_ATTR_FIELD_USER_DATA, "data");

_Static_assert(offsetof(struct ucp_tag_info, tag) == offsetof(ucp_tag_recv_info_t, sender_tag), "tag");
_Static_assert(offsetof(struct ucp_tag_info, length) == offsetof(ucp_tag_recv_info_t, length),
               "length");
_Static_assert(sizeof(struct ucp_tag_info) == sizeof(ucp_tag_recv_info_t), "info");

_Static_assert(UCS_OK == 0 && UCS_ERR_LAST == -100, "statuses, as IS_REQUEST takes them");
_Static_assert(sizeof(ucs_status_t) == sizeof(signed char), "statuses are bytes");
_Static_assert(sizeof(ucp_tag_t) == sizeof(uint64_t), "tags");

// What a function takes and returns. UCX's handles are pointers, which are declared here as none of it
// in particular.
#define TAKES(function, result, ...) \
    _Static_assert(__builtin_types_compatible_p(__typeof__(function), result(__VA_ARGS__)), #function)
TAKES(ucp_worker_progress, unsigned, ucp_worker_h);
TAKES(ucp_worker_arm, ucs_status_t, ucp_worker_h);
TAKES(ucp_tag_send_nbx, ucs_status_ptr_t, ucp_ep_h, const void *, size_t, ucp_tag_t,
      const ucp_request_param_t *);
TAKES(ucp_tag_probe_nb, ucp_tag_message_h, ucp_worker_h, ucp_tag_t, ucp_tag_t, int,
      ucp_tag_recv_info_t *);
TAKES(ucp_tag_msg_recv_nbx, ucs_status_ptr_t, ucp_worker_h, void *, size_t, ucp_tag_message_h,
      const ucp_request_param_t *);
TAKES(ucp_request_free, void, void *);
typedef void sent(void *, ucs_status_t, void *);
typedef void received(void *, ucs_status_t, const ucp_tag_recv_info_t *, void *);
_Static_assert(__builtin_types_compatible_p(ucp_send_nbx_callback_t, sent *), "sent");
_Static_assert(__builtin_types_compatible_p(ucp_tag_recv_nbx_callback_t, received *), "received");
