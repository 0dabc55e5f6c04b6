"""The contact event types and the metrics, and which of them name the same fact.

**One fact, one row, both columns**: a paid order is `purchase_completed` and "Order Paid", recorded once. A pair stands
here only when every fact of the one is a fact of the other; a campaign's delivery, say, is a template's delivery too,
but not the other way round, so the two are not a pair and the row has whichever its source says.

What must stay true: names are the seeds', to the letter (automations and summaries are found by them); every metric
has a category, a label in each language, and every trigger a metric.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

Language = Literal["pt-BR", "en", "es"]

LANGUAGES: tuple[Language, ...] = ("pt-BR", "en", "es")

CUSTOM_CATEGORY = "custom"  # metrics that a tenant or a source makes up

METRIC_CATEGORIES = ("ecommerce", "messaging", "tracking", "engagement", "contact", CUSTOM_CATEGORY)


@dataclass(frozen=True, slots=True)
class Labels:
    """What people read."""

    pt_br: str
    en: str
    es: str

    def of(self, language: Language) -> str:
        return {"pt-BR": self.pt_br, "en": self.en, "es": self.es}[language]


@dataclass(frozen=True, slots=True)
class ContactEventType:
    """One of the 20 types; ``metric`` is the metric that names the same fact, if one does."""

    name: str
    category: str
    metric: str | None
    labels: Labels


@dataclass(frozen=True, slots=True)
class Metric:
    """One of the 32 metrics; ``contact_event_type`` is the type that names the same fact, if one does."""

    name: str
    category: str
    contact_event_type: str | None
    labels: Labels


def _type(name: str, category: str, metric: str | None, pt_br: str, en: str, es: str) -> tuple[str, ContactEventType]:
    return name, ContactEventType(name, category, metric, Labels(pt_br, en, es))


def _metric(name: str, category: str, contact_event_type: str | None, pt_br: str, es: str) -> tuple[str, Metric]:
    return name, Metric(name, category, contact_event_type, Labels(pt_br, name, es))


# fmt: off
CONTACT_EVENT_TYPES: dict[str, ContactEventType] = dict([
    _type("purchase_completed", "Purchase", "Order Paid",
          "Compra concluída", "Purchase completed", "Compra completada"),
    _type("purchase_abandoned", "Purchase", "Checkout Abandoned",
          "Compra abandonada", "Purchase abandoned", "Compra abandonada"),
    _type("product_viewed", "Product", None, "Produto visto", "Product viewed", "Producto visto"),
    _type("product_asked", "Product", None, "Pergunta sobre produto", "Product asked about", "Pregunta sobre producto"),
    _type("interest_detected", "Interest", None, "Interesse detectado", "Interest detected", "Interés detectado"),
    _type("sentiment_detected", "Sentiment", None,
          "Sentimento detectado", "Sentiment detected", "Sentimiento detectado"),
    _type("ticket_opened", "Support", None, "Chamado aberto", "Ticket opened", "Ticket abierto"),
    _type("ticket_resolved", "Support", None, "Chamado resolvido", "Ticket resolved", "Ticket resuelto"),
    _type("conversation_started", "Conversation", "Conversation Opened",
          "Conversa iniciada", "Conversation started", "Conversación iniciada"),
    _type("conversation_ended", "Conversation", "Conversation Closed",
          "Conversa encerrada", "Conversation ended", "Conversación finalizada"),
    _type("campaign_delivered", "Campaign", None, "Campanha entregue", "Campaign delivered", "Campaña entregada"),
    _type("campaign_engaged", "Campaign", None,
          "Interação com campanha", "Campaign engaged", "Interacción con campaña"),
    _type("campaign_ignored", "Campaign", None, "Campanha ignorada", "Campaign ignored", "Campaña ignorada"),
    _type("subscription_created", "Subscription", None,
          "Assinatura criada", "Subscription created", "Suscripción creada"),
    _type("subscription_cancelled", "Subscription", None,
          "Assinatura cancelada", "Subscription cancelled", "Suscripción cancelada"),
    _type("form_submitted", "Form", None, "Formulário enviado", "Form submitted", "Formulario enviado"),
    _type("discount_requested", "Discount", None, "Desconto solicitado", "Discount requested", "Descuento solicitado"),
    _type("discount_accepted", "Discount", None, "Desconto aceito", "Discount accepted", "Descuento aceptado"),
    _type("agent_insight", "Agent", None, "Percepção do agente", "Agent insight", "Percepción del agente"),
    _type("objection_raised", "Objection", None, "Objeção levantada", "Objection raised", "Objeción planteada"),
])

METRICS: dict[str, Metric] = dict([
    _metric("Order Placed", "ecommerce", None, "Pedido Criado", "Pedido Creado"),
    _metric("Order Paid", "ecommerce", "purchase_completed", "Pedido Pago", "Pedido Pagado"),
    _metric("Order Cancelled", "ecommerce", None, "Pedido Cancelado", "Pedido Cancelado"),
    _metric("Order Fulfilled", "ecommerce", None, "Pedido Enviado", "Pedido Despachado"),
    _metric("Order Refunded", "ecommerce", None, "Pedido Reembolsado", "Pedido Reembolsado"),
    _metric("Checkout Started", "ecommerce", None, "Checkout Iniciado", "Checkout Iniciado"),
    _metric("Checkout Abandoned", "ecommerce", "purchase_abandoned", "Checkout Abandonado", "Checkout Abandonado"),
    _metric("Checkout Recovered", "ecommerce", None, "Checkout Recuperado", "Checkout Recuperado"),
    _metric("Customer Created", "ecommerce", None, "Cliente Criado", "Cliente Creado"),
    _metric("Message Received", "messaging", None, "Mensagem Recebida", "Mensaje Recibido"),
    _metric("Message Sent", "messaging", None, "Mensagem Enviada", "Mensaje Enviado"),
    _metric("Message Delivered", "messaging", None, "Mensagem Entregue", "Mensaje Entregado"),
    _metric("Message Read", "messaging", None, "Mensagem Lida", "Mensaje Leído"),
    _metric("Message Failed", "messaging", None, "Falha na Mensagem", "Mensaje Fallido"),
    _metric("Template Sent", "messaging", None, "Template Enviado", "Plantilla Enviada"),
    _metric("Template Delivered", "messaging", None, "Template Entregue", "Plantilla Entregada"),
    _metric("Template Read", "messaging", None, "Template Lido", "Plantilla Leída"),
    _metric("Campaign Sent", "messaging", None, "Campanha Enviada", "Campaña Enviada"),
    _metric("AI Response Sent", "messaging", None, "Resposta de IA Enviada", "Respuesta de IA Enviada"),
    _metric("Shipment Created", "tracking", None, "Envio Criado", "Envío Creado"),
    _metric("Shipment In Transit", "tracking", None, "Envio em Trânsito", "Envío en Tránsito"),
    _metric("Shipment Out For Delivery", "tracking", None, "Saiu para Entrega", "En Reparto"),
    _metric("Shipment Delivered", "tracking", None, "Envio Entregue", "Envío Entregado"),
    _metric("Shipment Exception", "tracking", None, "Problema no Envio", "Incidencia en el Envío"),
    _metric("Link Clicked", "engagement", None, "Link Clicado", "Enlace Clicado"),
    _metric("Contact Created", "contact", None, "Contato Criado", "Contacto Creado"),
    _metric("Contact Updated", "contact", None, "Contato Atualizado", "Contacto Actualizado"),
    _metric("Tag Added", "contact", None, "Tag Adicionada", "Etiqueta Agregada"),
    _metric("Tag Removed", "contact", None, "Tag Removida", "Etiqueta Eliminada"),
    _metric("Conversation Opened", "contact", "conversation_started", "Conversa Aberta", "Conversación Abierta"),
    _metric("Conversation Closed", "contact", "conversation_ended", "Conversa Fechada", "Conversación Cerrada"),
    _metric("Conversation Assigned", "contact", None, "Conversa Atribuída", "Conversación Asignada"),
])
# fmt: on

WEBHOOK_TRIGGER_METRIC = "__webhook__"
SCHEDULE_TRIGGER_METRIC = "__schedule__"

TRIGGER_TO_METRIC: dict[str, str] = {
    "order_created": "Order Placed",
    "order_paid": "Order Paid",
    "checkout_created": "Checkout Started",
    "cart_abandoned": "Checkout Abandoned",
    "tracking_updated": "Shipment In Transit",
    "message_received": "Message Received",
    "new_contact": "Contact Created",
    "tag_added": "Tag Added",
    "webhook": WEBHOOK_TRIGGER_METRIC,
    "schedule": SCHEDULE_TRIGGER_METRIC,
}

# The two that no metric starts have no way back.
METRIC_TO_TRIGGER: dict[str, str] = {
    metric: trigger for trigger, metric in TRIGGER_TO_METRIC.items() if metric in METRICS
}


def metric_category(metric: str) -> str:
    """The category of a metric; `custom` for those that are not ours."""
    known = METRICS.get(metric)
    return CUSTOM_CATEGORY if known is None else known.category


def metric_label(metric: str, language: Language) -> str:
    """What a person reads for a metric; its own name when it is not ours."""
    known = METRICS.get(metric)
    return metric if known is None else known.labels.of(language)


def metric_of(contact_event_type: str) -> str | None:
    """The metric that names the same facts as a contact event type, None when there is none."""
    known = CONTACT_EVENT_TYPES.get(contact_event_type)
    return None if known is None else known.metric


def contact_event_type_of(metric: str) -> str | None:
    """The contact event type that names the same facts as a metric, None when there is none."""
    known = METRICS.get(metric)
    return None if known is None else known.contact_event_type


def unknown_type(contact_event_type: str | None) -> str | None:
    """What is wrong with a contact event type that is none of the 20, for whoever named it; None when it is one, or
    none is named. Facts of one's own are metrics: any name will do for those."""
    if contact_event_type is None or contact_event_type in CONTACT_EVENT_TYPES:
        return None
    near = get_close_matches(contact_event_type, CONTACT_EVENT_TYPES, n=1)
    meant = f"did you mean {near[0]}?" if near else "a fact of your own is a metric, which may have any name"
    return f"there is no contact event type {contact_event_type[:100]!r}: {meant}"
