"""Names of the threads of an episode's requests, chosen once its `rollout` is over."""

from __future__ import annotations

from collections.abc import Sequence

from runner.episode.key import MAIN
from runner.episode.state import ConversationState, EpisodeState

__all__ = ["name_threads"]


def name_threads(episode: EpisodeState, threads: Sequence[ConversationState]) -> None:
    """Set the names under which the threads become trajectories. A second call changes nothing.

    Unless the author's own `main` took turns or has its own engine, one of the trained or evaluated threads with turns
    becomes `main`. Threads that were offered tools are preferred, and then the thread that lasted longest, counted in
    requests of the episode between the thread's first request and its last. The number of turns is used only for ties:
    a sub-agent may take more turns than its parent, but begins later and ends earlier.

    Other threads are named by the label of their client, or numbered.
    """
    if not threads or episode.renamed:
        return
    main = _main(episode, threads)
    if main is not None and MAIN in episode.conversations:
        episode.conversations[MAIN].close_sessions()
        del episode.conversations[MAIN]
    taken = {
        name
        for name, conversation in episode.conversations.items()
        if not any(conversation is thread for thread in threads)
    }
    numbered = 0
    for thread in threads:
        name = MAIN if thread is main else next((one.label for one in thread.requests if one.label), "")
        while not name or name in taken or (name == MAIN and thread is not main):
            numbered += 1
            name = f"{MAIN}-{numbered}"
        taken.add(name)
        episode.renamed[thread.thread] = name
    _rename(episode, threads)
    home = episode.conversations.get(MAIN)
    # A thread without turns has no trajectory of its own, but its requests are kept.
    silent = [thread for thread in threads if not thread.turns and thread is not home]
    if home is not None and home.turns:
        home.requests += [request for thread in silent for request in thread.requests]
        home.requests.sort(key=lambda request: request.number)


def _main(episode: EpisodeState, threads: Sequence[ConversationState]) -> ConversationState | None:
    own = episode.conversations.get(MAIN)
    if own is not None and (own.turns or MAIN in episode.shared.other_models):
        return None
    trained = [thread for thread in threads if thread.counted and thread.turns]
    return max(trained, key=lambda thread: (_has_tools(thread), _at_work(thread), len(thread.turns)), default=None)


def _has_tools(thread: ConversationState) -> bool:
    return any(node.segment.tools for node in thread.nodes)


def _at_work(thread: ConversationState) -> int:
    numbers = [request.number for request in thread.requests]
    return max(numbers) - min(numbers)


def _rename(episode: EpisodeState, threads: Sequence[ConversationState]) -> None:
    names = episode.renamed
    for thread in threads:
        thread.name = names[thread.thread]
    for conversation in episode.conversations.values():
        for segment in conversation.segments:
            if segment.origin is not None:
                segment.origin.agent = names.get(segment.origin.agent, segment.origin.agent)
        for turn in conversation.turns:
            turn.agent = names.get(turn.agent, turn.agent)
        for request in conversation.requests:
            request.parent_agent = names.get(request.parent_agent, request.parent_agent)
    episode.conversations = {
        names.get(name, name): conversation for name, conversation in episode.conversations.items()
    }
