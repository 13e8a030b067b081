"""Loads the text side of a model (tokenizer and chat template) with a gateway's settings."""

from pathlib import Path

from engine.config import GatewayConfig, GenerationDefaults, is_template
from engine.errors import ConfigError
from router.text.tokenizer import TextModel, load_text_model


def text_model(directory: Path, config: GatewayConfig) -> TextModel:
    """Loads the text side of a model. Raises CheckpointError.

    Raises ConfigError if the operator's chat template cannot be read.
    """
    return load_text_model(
        directory,
        chat_template=_template_of(config),
        parsers=(config.tool_call_parser, config.reasoning_parser),
        has_defaults=config.generation_config is GenerationDefaults.AUTO,
    )


def _template_of(config: GatewayConfig) -> str | None:
    """Returns the operator's chat template, if one is configured.

    Raises ConfigError if its file cannot be read.
    """
    template = config.chat_template
    if template is None or is_template(template):
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gateway.chat_template: {template}: {error}") from error
