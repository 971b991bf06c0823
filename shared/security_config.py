"""The section `security` of the configuration."""

from pydantic import Field, model_validator

from shared.section import Section


class SecurityConfig(Section):
    """Access to the ports. Needed if learner or environment server reach beyond loopback."""

    folder: str = Field(
        "",
        description="ca.pem, certificate.pem, key.pem and tokens of this side, as `murmur certs` "
        "makes them; read again when they change; empty: plain text, on loopback addresses only",
    )
    insecure: bool = Field(
        False, description="plain text, without tokens, on any address; logged as a warning"
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> "SecurityConfig":
        if self.folder and self.insecure:
            raise ValueError(f"folder '{self.folder}' and insecure=true contradict each other")
        return self
