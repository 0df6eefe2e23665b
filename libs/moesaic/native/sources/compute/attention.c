// Attention over the paged KV cache, for decoded rows and chunks of prompts alike.
//   Tiles    STRETCH positions at a time, counted from the sequence's start, with a running softmax.
//   Order    a row's result depends on its own query and what it sees of the cache, never on the
//            rows beside it, as long as what is cached is finite.
#include "compute/attention_tile.h"
#include "compute/pool.h"

enum { QUERIES = 192 };  // queries (of several rows and heads) that share a tile's keys and values
enum { CHUNK = 4 };      // tasks that a thread takes at a time, so that it knows the next

struct task {
    int32_t sequence, kv_head, num_kv_heads;
    int64_t begin, end;  // rows of the sequence
};

static int64_t rows_per_task(const struct shape *s) {
    const int64_t group = s->heads / s->kv_heads;
    return group < QUERIES ? QUERIES / group : 1;
}
static int64_t max_queries(const struct shape *s) {
    return rows_per_task(s) * (s->heads / s->kv_heads);
}
static int64_t desk_size(const struct shape *s) {
    const int64_t queries = max_queries(s), values = wide(s->value_dim);
    return queries * (s->key_dim + STRETCH + values + 2) + (s->key_dim + values) * STRETCH + 64;
}
static struct desk desk_at(float *at, const struct shape *s) {
    const int64_t queries = max_queries(s), values = wide(s->value_dim);
    struct desk d;
    d.keys = at, at += s->key_dim * STRETCH;
    d.values = at, at += values * STRETCH;
    d.scores = at, at += queries * STRETCH;
    d.sums = at, at += queries * values;
    d.queries = at, at += queries * s->key_dim;
    d.largest = at, at += queries;
    d.totals = at;
    return d;
}

static struct desk part_of(const struct desk *d, const struct shape *s, int64_t queries) {
    struct desk part = *d;
    part.queries += queries * s->key_dim;
    part.scores += queries * STRETCH;
    part.sums += queries * wide(s->value_dim);
    part.largest += queries;
    part.totals += queries;
    return part;
}

// The positions that a task's rows see: from the tile with the first of them up to `end`.
struct span {
    int64_t start, end;
};
static struct span span_of(const struct shape *s, const struct sequence *q, const struct task *t) {
    const int64_t first = q->length - q->num_rows + t->begin;
    const int64_t start = s->window && first >= s->window ? first - s->window + 1 : 0;
    return (struct span){start - start % STRETCH, q->length - q->num_rows + t->end};
}

static struct sequence sequence_of(const struct batch *b, const struct task *t) {
    const int32_t i = t->sequence;
    return (struct sequence){b->first_rows[i], b->num_rows[i], b->lengths[i],
                             b->block_tables + i * b->table_width};
}

// `next` is this thread's next task; none: not known.
static void attend(const struct shape *s, const struct batch *batch, const struct task *task,
                   const struct task *next, const float *queries, const float *cache, float *out,
                   const struct desk *desk) {
    const struct sequence sequence = sequence_of(batch, task);
    const struct span span = span_of(s, &sequence, task);
    const int64_t rows = task->end - task->begin, group = s->heads / s->kv_heads;
    struct queries heads[task->num_kv_heads];
    struct desk parts[task->num_kv_heads];
    for (int32_t h = 0; h < task->num_kv_heads; h++) {
        heads[h] = (struct queries){s,
                                    task->kv_head + h,
                                    group,
                                    sequence.first_row + task->begin,
                                    rows * group,
                                    span.end - rows};
        parts[h] = part_of(desk, s, h * rows * group);
        begin(&heads[h], queries, &parts[h]);
    }
    struct found tiles[2], *here = &tiles[0], *then = &tiles[1];
    find(s, &sequence, cache, task->kv_head, span.start, here);
    for (int64_t start = span.start; start < span.end; start += STRETCH)
        for (int32_t h = 0; h < task->num_kv_heads; h++) {
            if (h + 1 < task->num_kv_heads) {
                find(s, &sequence, cache, heads[h + 1].kv_head, start, then);
            } else if (start + STRETCH < span.end) {
                find(s, &sequence, cache, task->kv_head, start + STRETCH, then);
            } else if (next) {
                const struct sequence other = sequence_of(batch, next);
                find(s, &other, cache, next->kv_head, span_of(s, &other, next).start, then);
            } else {
                then = here;
            }
            attend_tile(&heads[h], here, then, start, &parts[h]);
            struct found *done = here;
            here = then, then = done;
        }
    for (int32_t h = 0; h < task->num_kv_heads; h++) finish(&heads[h], &parts[h], out);
}

EXPORT int64_t attention_scratch(const struct shape *shape, const struct batch *batch,
                                 int threads) {
    int64_t tasks = 0;
    for (int64_t b = 0; b < batch->count; b++)
        tasks += (batch->num_rows[b] / rows_per_task(shape) + 1) * shape->kv_heads;
    return threads * desk_size(shape) * 4 + tasks * (int64_t)sizeof(struct task);
}

struct call {
    const struct shape *shape;
    const struct batch *batch;
    const float *queries, *cache;
    float *out;
    const struct task *tasks;
    float *desks;
    int64_t num_tasks, chunk;
};

static void some_tasks(void *with, int64_t part, int worker) {
    const struct call *c = with;
    const struct desk d = desk_at(c->desks + worker * desk_size(c->shape), c->shape);
    const int64_t first = part * c->chunk;
    const int64_t end = first + c->chunk < c->num_tasks ? first + c->chunk : c->num_tasks;
    for (int64_t i = first; i < end; i++)
        attend(c->shape, c->batch, &c->tasks[i], i + 1 < end ? &c->tasks[i + 1] : 0, c->queries,
               c->cache, c->out, &d);
}

EXPORT void attention(const struct shape *shape, const struct batch *batch, const float *queries,
                      const float *cache, float *out, uint8_t *scratch, int threads) {
    struct task *tasks = (struct task *)(scratch + threads * desk_size(shape) * 4);
    const int64_t step = rows_per_task(shape);
    int64_t num_tasks = 0;
    for (int32_t b = 0; b < batch->count; b++) {
        const int64_t rows = batch->num_rows[b];
        // A cached row holds all heads: few queries of many sequences take them in one go.
        const int together = rows * shape->heads <= QUERIES && batch->count >= 2 * threads;
        const int32_t heads = together ? (int32_t)shape->kv_heads : 1;
        for (int64_t end = rows; end > 0; end -= step)  // those that see most first
            for (int32_t h = 0; h < shape->kv_heads; h += heads)
                tasks[num_tasks++] = (struct task){b, h, heads, end > step ? end - step : 0, end};
    }
    struct call call = {shape,
                        batch,
                        queries,
                        cache,
                        out,
                        tasks,
                        (float *)scratch,
                        num_tasks,
                        num_tasks / threads < CHUNK ? 1 : CHUNK};
    in_parallel(some_tasks, &call, (num_tasks + call.chunk - 1) / call.chunk, threads);
}
