"""The words on pages that need an explanation, each with one in a sentence. A page ends with those that occur on it."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Final

WORDS: Final[Mapping[str, str]] = {
    "accuracy": "The mean accuracy of the models that answered, as their application declares it.",
    "application": "What is served under one name: a graph of stages with a deadline.",
    "arrivals": "Requests, counted when they reach the server.",
    "attainment": "The part of all requests that were answered within their deadline.",
    "batch": "Requests that run together in one pass of a model.",
    "bias": "How much longer batches took than estimated, on average; negative if they were faster. Estimates are P99s "
    "unless the profile was made for another percentile, so most batches are faster.",
    "budget": "What is left of the deadline for queue and model, when the network has had its part.",
    "canary": "A new version that gets a part of the requests and is compared with the version before it.",
    "cold start": "The start of a replica, from its order to its first batch: process, weights, first pass.",
    "core-seconds": "The cores that replicas held, times the seconds for which they held them.",
    "deadline": "How long a request may take, from the client's sending to the answer.",
    "dropped": "Requests that were given up because they could not be answered in time (HTTP 504).",
    "expected time to the answer": "The time that this stage and those after it need, with what waits there now.",
    "failed": "Requests that ended with an error of the model or the server.",
    "goodput": "Requests answered within their deadline, per second. Of a live run over the time of its load: from the "
    "first request to the end of the last, without pauses of a minute or more. Of a simulated run over all of it.",
    "headroom": "Capacity beyond what the present rate needs, for what may come.",
    "in panic": "The last seconds alone decide, because requests rose steeply.",
    "in place": "Cores of a running replica are changed without a restart.",
    "late": "Requests that were answered after their deadline.",
    "least time to the answer": "The shortest time in which this stage and those after it could answer.",
    "link": "The clients' network, which takes a part of each deadline.",
    "mean error": "The mean difference between estimated and actual durations, as a part of the estimate.",
    "node": "A machine on which replicas run.",
    "node-hours": "Nodes times the hours for which they were held.",
    "on demand": "Nodes that are rented when they are needed, and given back when they are empty.",
    "p50": "The median: half of the answered requests took no longer.",
    "p99": "99 of 100 answered requests took no longer.",
    "path": "A chain of stages through the graph, which may have a deadline of its own.",
    "pipelines": "Replicas that start as parts of one model and serve together until each has all of it.",
    "profile": "A file with measured durations of a model's batches, from which speeds are predicted.",
    "rejected": "Requests that were refused at once, because too many waited (HTTP 503).",
    "replica": "One process with a copy of a model, which serves requests on its cores.",
    "rollout": "The steps by which one version of an application replaces another.",
    "route": "The stages that a request visited.",
    "rps": "Requests per second.",
    "saturated": "More requests come than all cores can serve in time.",
    "seed": "The number that decides all random draws: the same seed gives the same run.",
    "shadows": "Processes beside replicas that compute some rows of their batches.",
    "slack": "The time left until a request's deadline; negative when it has passed.",
    "SLO": "Service level objective: the deadline of a request, from the client's sending to the answer.",
    "stage": "One model of an application, or one step in Python; requests pass stages in the order of the graph.",
    "store": "Where nodes fetch the weights of a model that no node has.",
    "system": "The policies that decide about replicas, their cores, batches, and which requests are given up.",
    "to fill": "The time until enough requests have come for a batch of that size.",
    "USD": "US dollars, by the prices that are declared or known for the nodes.",
    "utilisation": "The part of its cores that a replica uses, on average.",
    "variant": "One of several models that can do the work of a stage.",
    "violations": "Requests that were not answered within their deadline: late, dropped, rejected and failed ones.",
    "visit": "A request, or a part of one, at one stage.",
    "wait": "The time in a queue, before the batch begins.",
    "Wh": "Watt-hours that the nodes drew, by the power that is declared, measured or assumed.",
}
"""By the word as headings have it."""

KINDS: Final[Mapping[str, str]] = {
    "plan": "which replicas the system wants from now on, and the largest batch",
    "kept": "the same replicas, but the plan now keeps or misses the deadline, or refuses another part of the requests",
    "lost": "a replica died and is replaced",
    "drain": "a replica stops after its batch",
    "shortage": "no node has room for a replica that is planned",
    "shadow": "a shadow is lost, or finds no room beside its replica",
    "pipeline": "a part of a pipeline is lost",
    "provision": "where replicas start, and from where their weights come",
    "node": "a node is rented, given back or lost",
    "rest": "without requests, the application gives up its replicas",
    "waking": "requests wait for the first replicas",
    "awake": "the replicas are ready",
    "planner": "no plan could be made",
    "system": "another system decides from now on, as was ordered",
    "unchanged": "another system was ordered that cannot decide here",
    "overseer": "what an overseer has compared, and which of its systems decides",
    "rollout": "a version gets more or fewer of the requests",
}
"""What a decision of each kind is about."""


def words_in(texts: Iterable[str]) -> dict[str, str]:
    """The words of `WORDS` that occur in these texts, with their explanations."""
    whole = "\n".join(texts)
    return {word: line for word, line in WORDS.items() if _pattern(word).search(whole)}


def word_of(heading: str) -> str:
    """The word that explains a heading, such as `attainment` of `attainment %`: the longest one in it, or nothing."""
    return max((word for word in WORDS if _pattern(word).search(heading)), key=len, default="")


@cache
def _pattern(word: str) -> re.Pattern[str]:
    """The word in one or several, not inside another word."""
    if word in {"SLO", "USD", "Wh"}:
        return re.compile(rf"\b{word}\b")
    return re.compile(rf"\b{re.escape(word)}(?:s|es)?\b", re.IGNORECASE)
