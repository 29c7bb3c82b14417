"""``instructor``: typed answers, by a forced tool and by a schema."""

import instructor
import openai
from checks import CAPITAL, KEY, LONG, MODEL, SUM, URL, run
from instructor.core import InstructorRetryException
from pydantic import BaseModel

MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)


class Sum(BaseModel):
    sum: int


def ask(method="create", text=SUM, mode=MODES[0], key=KEY, **options):
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0)
    completions = instructor.from_openai(client, mode=mode).chat.completions
    common = {"model": MODEL, "temperature": 0, "max_tokens": 150, "max_retries": 0}
    messages = [{"role": "user", "content": text}]
    return getattr(completions, method)(messages=messages, **{**common, **options})


def check_chat():
    assert "Rome" in ask(text=CAPITAL, response_model=None).choices[0].message.content


def check_stream():
    for mode in MODES:
        *_, last = ask("create_partial", mode=mode, response_model=Sum)
        assert isinstance(last.sum, int), mode


def check_tools():
    assert isinstance(ask(response_model=Sum), Sum)


def check_structured():
    assert isinstance(ask(mode=instructor.Mode.JSON_SCHEMA, response_model=Sum), Sum)


def check_errors():
    for status, options in ((400, {"text": LONG}), (401, {"key": "wrong"})):
        try:
            ask(response_model=Sum, **options)
        except (InstructorRetryException, openai.APIStatusError) as error:
            found = error if isinstance(error, openai.APIStatusError) else error.__cause__
            assert f"{status}" in f"{found}", error
        else:
            raise AssertionError("no error")


def check_cancel():
    body = {"ignore_eos": True}
    stream = ask(text=CAPITAL, response_model=None, stream=True, max_tokens=20_000, extra_body=body)
    next(iter(stream))
    stream.close()


run(globals())
