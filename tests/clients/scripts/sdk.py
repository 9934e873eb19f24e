"""A loop of a provider's own library: usage: sdk.py chat|responses|messages whole|stream PROMPT."""

import json
import sys

import shell

FORM, STREAMS, PROMPT = sys.argv[1], sys.argv[2] == "stream", sys.argv[3]
if FORM == "messages":  # each library takes seconds to import
    import anthropic
else:
    import openai
ASKED = {"role": "user", "content": PROMPT}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"name": "bash", "description": "Run a command."}


def chat() -> str:
    client, messages = openai.OpenAI(), [ASKED]
    tools = [{"type": "function", "function": {**BASH, "parameters": SCHEMA}}]
    while True:
        asked = {"model": "default", "messages": messages, "tools": tools}
        if STREAMS:
            with client.chat.completions.stream(**asked) as stream:
                said = stream.get_final_completion().choices[0].message
        else:
            said = client.chat.completions.create(**asked).choices[0].message
        messages.append(said.to_dict())
        if not said.tool_calls:
            return said.content
        for call in said.tool_calls:
            found = shell.run(json.loads(call.function.arguments)["command"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


def responses() -> str:
    client, items = openai.OpenAI(), [ASKED]
    tools = [{"type": "function", **BASH, "parameters": SCHEMA, "strict": False}]
    while True:
        asked = {"model": "default", "input": items, "tools": tools, "store": False}
        if STREAMS:
            with client.responses.stream(**asked) as stream:
                said = stream.get_final_response()
        else:
            said = client.responses.create(**asked)
        items += [item.to_dict() for item in said.output]
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return said.output_text
        for call in calls:
            found = shell.run(json.loads(call.arguments)["command"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": found})


def messages() -> str:
    client, history = anthropic.Anthropic(), [ASKED]
    tools = [{**BASH, "input_schema": SCHEMA}]
    while True:
        asked = {"model": "default", "messages": history, "tools": tools, "max_tokens": 1000}
        if STREAMS:
            with client.messages.stream(**asked) as stream:
                said = stream.get_final_message()
        else:
            said = client.messages.create(**asked)
        history.append({"role": "assistant", "content": [block.to_dict() for block in said.content]})
        calls = [block for block in said.content if block.type == "tool_use"]
        if not calls:
            return said.content[-1].text
        found = [
            {"type": "tool_result", "tool_use_id": call.id, "content": shell.run(call.input["command"])}
            for call in calls
        ]
        history.append({"role": "user", "content": found})


print({"chat": chat, "responses": responses, "messages": messages}[FORM]())
