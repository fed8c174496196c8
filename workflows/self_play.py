"""Nim, played by two roles of the model under training: who takes the last stone wins.

`policy` and `opponent` are the same weights in two roles, each with a conversation and a credit of its own: every move
of the winner is worth 1.0, every move of the loser -1.0. A move that the rules forbid loses the game at once and costs
twice that, else it would be as good as any where the game is lost already.

What one role wins the other loses, so the reward of games against oneself shows no more than that the rules are kept.
A row may put another player in the opponent's place, who makes no mistake: where the row's ``rival_takes`` is not 0, it
says how many stones that one takes when every move loses. How often the policy beats him is what it has learned.
"""

from areal_async import Message, Policy, Prompt, Reply, Rewards
from workflows.nim import FORBIDDEN, best_move, question, read_move


async def self_play(prompt: Prompt, policy: Policy, opponent: Policy) -> Rewards:
    """Play one game from ``prompt["stones"]`` stones; ``prompt["first"]`` names the role that begins."""
    stones = int(prompt["stones"])
    rival_takes = int(prompt.row.get("rival_takes", 0))
    rival = None if rival_takes else opponent
    players = [policy, rival] if prompt["first"] == "policy" else [rival, policy]
    said: list[list[Message]] = [[], []]
    replies: list[list[Reply]] = [[], []]
    num_best = num_chances = num_moves = 0
    turn = 0
    while True:
        num_moves += 1
        player = players[turn]
        if player is None:
            taken: int | None = best_move(stones) or min(rival_takes, stones)
        else:
            said[turn].append({"role": "user", "content": question(stones)})
            reply = await player.chat(said[turn])
            said[turn].append(reply.message)
            replies[turn].append(reply)
            taken = read_move(reply.text, stones)
            if best_move(stones):
                num_chances += 1
                num_best += taken == best_move(stones)
        if taken is None:
            winner = 1 - turn
            break
        stones -= taken
        if not stones:
            winner = turn
            break
        turn = 1 - turn
    policy.info["num_moves"] = num_moves
    policy.info["share_legal_moves"] = (num_moves - (taken is None)) / num_moves
    policy.info["policy_wins"] = players[winner] is policy
    if num_chances:
        policy.info["share_best_moves"] = num_best / num_chances
    rewards = {reply.id: 1.0 if player == winner else -1.0 for player in (0, 1) for reply in replies[player]}
    return rewards if taken else rewards | {replies[turn][-1].id: FORBIDDEN}
