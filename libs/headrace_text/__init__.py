"""Text to tokens and back, for each served model. No router code and no engine library.

- codec: the interface of a model's tokenizer and chat template
- hugging_face: the codec of a model folder in Hugging Face's format
- encoder: bounded calls of the libraries tokenizers and kitoken
- chat_encoder: conversations to tokens, with known texts cached by tenant
- control_tokens: protection against control tokens in clients' texts
- chat_template: Jinja chat templates, rendered in a sandbox
- load: the codecs of all served models, and that of the simulated one
- detokenizer: tokens to text while they are generated, and stop strings in it
"""
