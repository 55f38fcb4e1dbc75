"""fastllm.server: the engine behind the HTTP interfaces that clients know.

A request's way, each step a file:

    gate       headers: request id, key, Host, Origin, the route that will run
    app        the table of routes; reads the body and hands it on as bytes
    pool       → a preparation process (`preparer`), where `prepare` parses, validates, renders and tokenises; it can be killed (and one that only reads grammars)
    generation submits the prompts; token events come back from the engine's thread through `bridge` (whose `bell` wakes the loop), and become text
    chat, completions, responses, messages   turn text into chunks of their interface, or into one object
    sse        sends the chunks, watches the client, and holds back a sequence whose client does not read

`runtime` owns the process: sockets, loading, signals, draining. Nothing here runs a model; nothing on the event loop parses a body.
"""
