// Answers layer requests as moesaic.experts.answering does, to the bit, without Python.
#ifndef MOESAIC_ANSWER_H
#define MOESAIC_ANSWER_H

#include "exchange/ring.h"

// Answers a message, if it is one of those registered, or a ping; false: Python has to.
int answer(struct answers *a, struct channel *c, const uint8_t *message, int64_t size);

#endif
