"""Ask for sampled answers: are they drafted? Most users sample, and an engine may draft greedy requests alone."""

from dflash_cli.probing.inference_server import MEASURED
from dflash_cli.probing.question import QUESTIONS, NotJudged, Outcome, QuestionSession, pooled_length
from dflash_cli.probing.undrafted_kinds import find_undrafted
from dflash_runtime.phrases import plural

NUM_ANSWERS, ANSWER_LEN, TEMPERATURE = 3, 64, 0.7


@QUESTIONS.register("sampled-answers")
def ask(session: QuestionSession) -> Outcome:
    """A finding if sampled answers are not drafted."""
    if session.asking.asked.temperature > 0:
        raise NotJudged("the measured answers are sampled already")
    found = [session.ask(item, ANSWER_LEN, MEASURED, TEMPERATURE) for item in session.prompts[:NUM_ANSWERS]]
    length, num_steps = pooled_length(found)
    if any(item.num_steps is None for item in found):
        raise NotJudged("the steps of an answer are not known")
    shown = "no verify step" if length is None else f"{length:.2f} tokens per step ({num_steps} steps)"
    return Outcome(
        seen=f"{shown} in {plural(len(found), 'answer')} at temperature {TEMPERATURE}",
        findings=list(find_undrafted(session, found, "sampled-answers", "sampled answers")),
    )
