"""The plain reference of a simulated fleet: a heap of events, one at a time. What is in C equals it to the last bit."""

from heapq import heappop, heappush

from moesaic_lab.simulation.edge.state import (
    ANSWER,
    ARRIVED,
    ASK,
    BEGIN,
    DIVIDE,
    EVENTS,
    KINDS,
    NOBODY,
    NUMBER,
    SIZE,
    EdgeState,
)

Event = tuple[float, int, float, int, int, int, int]  # see ``EVENT``


def advance(state: EdgeState, until_s: float) -> None:
    """Carry out all events before ``until_s``; those of the state are left for the next call."""
    _Loop(state).run(until_s)


class _Loop:
    def __init__(self, state: EdgeState) -> None:
        self.s = state
        self.heap: list[Event] = [tuple(e) for e in state.heap[: state.control[SIZE]].tolist()]

    def run(self, until_s: float) -> None:
        s = self.s
        do = {BEGIN: self._begin, DIVIDE: self._divide, ASK: self._ask, ANSWER: self._answer}
        arrived, count = int(s.control[ARRIVED]), 0
        while True:
            next_s = float(s.at_s[arrived]) if arrived < s.num_requests else float("inf")
            if self.heap and self.heap[0][0] < next_s:
                if not self.heap[0][0] < until_s:
                    break
                event = heappop(self.heap)
                do[event[3] % KINDS](event[3] // KINDS, event)
            else:
                if not next_s < until_s:
                    break
                self._arrive(arrived, next_s)
                arrived += 1
            count += 1
        s.control[ARRIVED] = arrived
        s.control[EVENTS] += count
        # Which is a heap, too.
        self.heap.sort()
        s.control[SIZE] = len(self.heap)
        for place, event in enumerate(self.heap):
            s.heap[place] = event

    def _push(self, at_s: float, kind: int, gpu: int, *, sent: float = 0.0, site: int = 0) -> None:
        self._push_work(at_s, kind, gpu, sent, site, 0, 0)

    def _push_work(
        self, at_s: float, kind: int, gpu: int, sent: float, site: int, choices: int, experts: int
    ) -> None:
        number = int(self.s.control[NUMBER])
        self.s.control[NUMBER] = number + 1
        event = (float(at_s), number, float(sent), gpu * KINDS + kind, site, choices, experts)
        heappush(self.heap, event)

    def _compute(self, site: int, at_s: float, seconds: float) -> float:
        """Occupy the GPU of a site that is free first; return when it is done."""
        s = self.s
        gpus = range(int(s.first_gpu[site]), int(s.first_gpu[site + 1]))
        gpu = min(gpus, key=lambda g: float(s.gpu_free_s[g]))
        done_s = max(at_s, float(s.gpu_free_s[gpu])) + seconds
        s.gpu_free_s[gpu] = done_s
        s.gpu_busy_s[site] += seconds
        return done_s

    def _send(self, site: int, at_s: float, sent: float) -> float:
        """Occupy the link of a site; return when the message is where it goes."""
        s = self.s
        seconds = float(s.costs[7]) + sent * float(s.costs[8]) * float(s.byte_s[site])
        gone_s = max(at_s, float(s.link_free_s[site])) + seconds
        s.link_free_s[site] = gone_s
        s.link_busy_s[site] += seconds
        return gone_s + float(s.costs[6])

    def _experts_s(self, experts: int, choices: int) -> float:
        c = self.s.costs
        return float(c[3]) + experts * float(c[4]) + choices * float(c[5])

    def _arrive(self, request: int, at_s: float) -> None:
        s = self.s
        site = int(s.site[request])
        if s.first_waiting[site] == NOBODY:
            s.first_waiting[site] = request
        else:
            s.next_waiting[s.last_waiting[site]] = request
        s.last_waiting[site] = request
        for gpu in range(int(s.first_gpu[site]), int(s.first_gpu[site + 1])):
            if s.num_members[gpu] == 0:
                self._new_pass(gpu, at_s)
                return

    def _new_pass(self, gpu: int, at_s: float) -> None:
        """Take in requests that wait, and begin the first layer, if there is any work."""
        s = self.s
        site, members = int(s.site_of[gpu]), int(s.num_members[gpu])
        while members < s.running and s.first_waiting[site] != NOBODY:
            request = int(s.first_waiting[site])
            s.first_waiting[site] = s.next_waiting[request]
            s.members[gpu, members] = request
            s.begun_s[request] = at_s
            members += 1
        s.num_members[gpu] = members
        if members == 0:
            return
        rows = keys = 0.0
        for request in s.members[gpu, :members].tolist():
            prompt, done = float(s.tokens[s.prompt[request]]), int(s.passes[request])
            rows += prompt if done == 0 else 1.0
            keys += prompt * (prompt + 1.0) * 0.5 if done == 0 else prompt + done
        c = s.costs
        s.attention_s[gpu] = float(c[0]) + rows * float(c[1]) + keys * float(c[2])
        s.layer[gpu] = 0
        self._attend(gpu, at_s)

    def _attend(self, gpu: int, at_s: float) -> None:
        s = self.s
        self._push(self._compute(int(s.site_of[gpu]), at_s, float(s.attention_s[gpu])), DIVIDE, gpu)

    def _begin(self, gpu: int, event: Event) -> None:
        s = self.s
        if s.layer[gpu] < s.num_layers:
            self._attend(gpu, event[0])
            return
        staying = 0
        for request in s.members[gpu, : s.num_members[gpu]].tolist():
            s.passes[request] += 1
            if s.passes[request] == 1:
                s.first_s[request] = event[0]
            if s.passes[request] > s.answers[request]:
                s.end_s[request] = event[0]
            else:
                s.members[gpu, staying] = request
                staying += 1
        s.num_members[gpu] = staying
        self._new_pass(gpu, event[0])

    def _pass_of(self, request: int) -> int:
        s = self.s
        if s.passes[request] == 0:
            return int(s.prompt[request])
        nth = int(s.start[request]) + int(s.passes[request]) - 1
        return int(s.pool[request]) + nth % s.num_answers

    def _divide(self, gpu: int, event: Event) -> None:
        s, at_s = self.s, event[0]
        home, layer = int(s.site_of[gpu]), int(s.layer[gpu])
        choices: dict[int, int] = {}  # by expert
        total = 0.0
        for request in s.members[gpu, : s.num_members[gpu]].tolist():
            place = self._pass_of(request) * s.num_layers + layer
            total += float(s.tokens[self._pass_of(request)])
            for entry in range(int(s.offsets[place]), int(s.offsets[place + 1])):
                expert, rows = int(s.experts[entry]), int(s.rows[entry])
                choices[expert] = choices.get(expert, 0) + rows
        work: dict[int, list[int]] = {}  # choices and experts by site
        for expert, rows in choices.items():
            found = work.setdefault(int(s.holder[home, layer, expert]), [0, 0])
            found[0] += rows
            found[1] += 1
        s.layer[gpu] = layer + 1
        s.done_s[gpu] = at_s
        s.pending[gpu] = len(work) - (home in work)
        for site, (rows, experts) in work.items():
            if site == home:
                s.done_s[gpu] = self._compute(home, at_s, self._experts_s(experts, rows))
                s.local[home] += rows
                continue
            # Of a row's choices, those that go elsewhere.
            absent = 1.0 - rows / (total * s.top_k)
            part = 1.0
            for _ in range(s.top_k):
                part *= absent
            sent = max(1.0, total * (1.0 - part))
            there_s = self._send(home, at_s, sent)
            s.remote[home] += rows
            s.messages[home] += 1
            self._push_work(there_s, ASK, gpu, sent, site, rows, experts)
        if s.pending[gpu] == 0:
            self._push(float(s.done_s[gpu]), BEGIN, gpu)

    def _ask(self, gpu: int, event: Event) -> None:
        at_s, _, sent, _, site, rows, experts = event
        done_s = self._compute(site, at_s, self._experts_s(experts, rows))
        self._push_work(done_s, ANSWER, gpu, sent, site, rows, experts)

    def _answer(self, gpu: int, event: Event) -> None:
        s = self.s
        at_s, _, sent, _, site, _, _ = event
        s.done_s[gpu] = max(float(s.done_s[gpu]), self._send(site, at_s, sent))
        s.pending[gpu] -= 1
        if s.pending[gpu] == 0:
            self._push(float(s.done_s[gpu]), BEGIN, gpu)
