// Promises to rows as the body of a request, see moesaic.experts.brownout.promises.
#ifndef MOESAIC_PROMISED_H
#define MOESAIC_PROMISED_H

#include "calls.h"

// Bytes of the body; 0 without promises.
int64_t promises_size(const struct promises *promises, int64_t count);

void write_promises(uint8_t *body, const struct promises *promises, int64_t count);

// The lowest threshold, 1 without promises.
float lowest_threshold(const struct promises *promises);

// Promises, with room for as many levels as there can be.
struct read_promises {
    struct promises is;
    int32_t thresholds[255], phases[255];
};

// Reads a body that does not change meanwhile; its levels of rows are used in place. False: it has another
// form.
int read_promises(const uint8_t *body, int64_t size, int64_t count, struct read_promises *read);

#endif
