"""The screen of `baton top`. It queries the admin API once a second, in a thread."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from deploy.admin.client import AdminClient, AdminError
from deploy.admin.schema import (
    PreviewAnswer,
)
from deploy.terminal.rows import (
    COLUMNS,
    USAGE,
    TopRow,
    TopSeen,
    TypedOrder,
    View,
    detail_text,
    headline,
    order_for,
    rows_of,
    typed_order,
)
from engine.errors import ConfigError

ASK_EVERY_S = 1.0
MAX_LINES = 30  # maximum number of lines in a preview


class TopPage(ModalScreen[None]):
    """Shows a text over the table until a key is pressed."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "dismiss", "back")]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        """Builds the widgets."""
        with VerticalScroll(classes="box"):
            yield Static(self._title, markup=False, classes="title")
            yield Static(self._text, markup=False)


class Confirmation(ModalScreen[bool]):
    """Shows the effects that an order would have. Only the key `y` gives the order."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "give the order"),
        Binding("n,escape,q,enter", "answer(False)", "leave it"),
    ]

    def __init__(self, order: TypedOrder, preview: PreviewAnswer, url: str) -> None:
        super().__init__()
        self._order = order
        self._preview = preview
        self._url = url

    def compose(self) -> ComposeResult:
        """Builds the widgets."""
        lines = [*self._preview.effects, *(f"{s.subject} {s.what}" for s in self._preview.steps)]
        shown = lines[:MAX_LINES] + (
            [f"{len(lines) - MAX_LINES} more"] if lines[MAX_LINES:] else []
        )
        with VerticalScroll(classes="box"):
            yield Static(f"{self._order.text}   ({self._url})", markup=False, classes="title")
            yield Static("\n".join(shown) or "nothing would change at once", markup=False)
            yield Static("y gives the order, any other answer leaves it", classes="dim")
        yield Footer()

    def action_answer(self, given: bool) -> None:  # noqa: FBT001 - an action's argument
        """Closes the page with the operator's answer."""
        self.dismiss(given)


class Top(App[None]):
    """The application: shows the views of one deployment."""

    CSS = """
    #head { height: auto; padding: 0 1; background: $panel; }
    #says { height: auto; padding: 0 1; }
    #says.bad { color: $error; }
    #line { display: none; }
    #line.open { display: block; }
    DataTable { height: 1fr; }
    .box { width: 90%; height: auto; max-height: 90%; padding: 1 2; background: $surface;
           border: round $primary; }
    .title { text-style: bold; padding-bottom: 1; }
    .dim { color: $text-muted; padding-top: 1; }
    TopPage, Confirmation { align: center middle; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(n), f"show('{view}')", view) for n, view in enumerate(View, 1)),
        Binding("slash", "filter", "filter"),
        Binding("colon", "order", "order"),
        Binding("f", "begin('f')", "flip"),
        Binding("d", "begin('d')", "drain"),
        Binding("x", "begin('x')", "stop"),
        Binding("w", "begin('w')", "weight", show=False),
        Binding("F", "begin('F')", "finish", show=False),
        Binding("a", "begin('a')", "abort", show=False),
        Binding("question_mark", "help", "help"),
        Binding("escape", "close_line", show=False),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, deployment: AdminClient) -> None:
        super().__init__()
        self._deployment = deployment
        self._view = View.WORKERS
        self._pattern = ""
        self._seen: TopSeen | None = None
        self._rows: list[TopRow] = []
        self._is_lost = True  # no answer to the last query, or no query yet
        self._takes_order = False  # True if the input line is an order, False if a filter

    def compose(self) -> ComposeResult:
        """Builds the widgets."""
        yield Static(self._deployment.url, id="head", markup=False)
        yield DataTable[str](cursor_type="row", zebra_stripes=True)
        yield Static("asking …", id="says", markup=False)
        yield Input(id="line")
        yield Footer()

    def on_mount(self) -> None:
        """Starts to query the admin API."""
        self.title = "baton top"
        self.query_one(DataTable).focus()
        self.set_interval(ASK_EVERY_S, self._ask)
        self._ask()

    # ------------------------------------------------------------ asking

    @work(thread=True, exclusive=True, group="ask", exit_on_error=True)
    def _ask(self) -> None:
        """Queries the data to show.

        After a failure the last data stay, and the screen reports the failure.
        """
        deployment = self._deployment
        try:
            seen = TopSeen(
                deployment.pools(), deployment.requests(), deployment.planner(), deployment.stores()
            )
        except AdminError as error:
            self._in_app(partial(self._lose, error))
            return
        self._in_app(partial(self._take, seen))

    def _in_app(self, callback: Callable[[], object]) -> None:
        """Calls a function in the app's thread.

        Does nothing if the app is ending, since its widgets are removed.
        """
        self.call_from_thread(lambda: callback() if self.is_running else None)

    def _lose(self, error: AdminError) -> None:
        self._is_lost = True
        self._say(f"{error}; asking again", is_bad=True)

    def _take(self, seen: TopSeen) -> None:
        if self._is_lost:
            self._is_lost = False
            self._say("? shows the keys")
        self._seen = seen
        self._draw()

    def _say(self, text: str, *, is_bad: bool = False) -> None:
        says = self.query_one("#says", Static)
        says.set_class(is_bad, "bad")
        says.update(text)

    # ------------------------------------------------------------ drawing

    def _draw(self) -> None:
        """Fills the table. The cursor stays on its row if the row still exists."""
        if self._seen is None:
            return
        table: DataTable[str] = self.query_one(DataTable)
        selected = self._selected()
        self._rows = rows_of(self._view, self._seen, self._pattern)
        labels = [str(column.label) for column in table.ordered_columns]
        texts, numbers = COLUMNS[self._view]
        if labels != [*texts, *numbers]:
            table.clear(columns=True)
            table.add_columns(*texts, *numbers)
        scroll_y = table.scroll_y
        table.clear()
        for row in self._rows:
            table.add_row(*row.cells, key=row.key)
        keys = [row.key for row in self._rows]
        if selected is not None and selected.key in keys:
            table.move_cursor(row=keys.index(selected.key), scroll=False)
        table.scroll_y = scroll_y
        shown = f"  /{self._pattern}" if self._pattern else ""
        head = f"{self._deployment.url}  {self._view}{shown}\n{headline(self._seen)}"
        self.query_one("#head", Static).update(head)

    def _selected(self) -> TopRow | None:
        index = self.query_one(DataTable).cursor_row
        return self._rows[index] if 0 <= index < len(self._rows) else None

    # ------------------------------------------------------------ keys

    def action_show(self, view: str) -> None:
        """Switches to another view."""
        self._view = View(view)
        self._draw()

    def action_filter(self) -> None:
        """Opens the input line for a filter."""
        self._open_line("filter: any part of a row", self._pattern, takes_order=False)

    def action_order(self) -> None:
        """Opens the input line for an order."""
        self._open_line("order: flip worker-0 prefill, pools prefill=1 decode=2, …", "")

    def action_begin(self, key: str) -> None:
        """Opens the input line with the start of an order for the selected row."""
        if text := order_for(key, self._view, self._selected()):
            self._open_line("order", text)

    def action_help(self) -> None:
        """Shows a page with all keys and orders."""
        keys = "\n".join(
            f"{each.key_display or each.key:14} {each.description}"
            for each in self.BINDINGS
            if isinstance(each, Binding) and each.description
        )
        written = "\n".join(USAGE.values())
        said = f"{keys}\nenter          all about a row\n\nOrders, after a colon:\n{written}"
        self.push_screen(TopPage("Keys", said))

    def action_close_line(self) -> None:
        """Closes the input line."""
        line = self.query_one("#line", Input)
        line.remove_class("open")
        self.query_one(DataTable).focus()

    def _open_line(self, hint: str, text: str, *, takes_order: bool = True) -> None:
        line = self.query_one("#line", Input)
        self._takes_order = takes_order
        line.placeholder, line.value = hint, text
        line.add_class("open")
        line.focus()
        line.cursor_position = len(text)

    def on_data_table_row_selected(self, _: DataTable.RowSelected) -> None:
        """Shows all fields of the selected row."""
        row = self._selected()
        if row is not None:
            self.push_screen(TopPage(row.key, detail_text(row)))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Sets the filter, or shows the effects that the order would have."""
        self.action_close_line()
        if not self._takes_order:
            self._pattern = event.value.strip()
            self._draw()
        elif event.value.strip():
            try:
                self._look_ahead(typed_order(event.value))
            except ConfigError as error:
                self._say(str(error), is_bad=True)

    # ------------------------------------------------------------ orders

    @work(thread=True, group="order")
    def _look_ahead(self, order: TypedOrder) -> None:
        try:
            preview = self._deployment.preview(order.path, order.body)
        except AdminError as error:
            self._in_app(partial(self._say, f"{order.text}: {error}", is_bad=True))
            return
        screen = Confirmation(order, preview, self._deployment.url)
        self._in_app(lambda: self.push_screen(screen, lambda given: self._answer(order, given)))

    def _answer(self, order: TypedOrder, given: bool | None) -> None:  # noqa: FBT001 - a callback
        if given:
            self._give(order)
        else:
            self._say(f"not ordered: {order.text}")

    @work(thread=True, group="order")
    def _give(self, order: TypedOrder) -> None:
        try:
            self._deployment.give(order.path, order.body)
        except AdminError as error:
            self._in_app(partial(self._say, f"{order.text}: {error}", is_bad=True))
            return
        self._in_app(partial(self._say, f"ordered: {order.text}"))
        self._in_app(self._ask)
