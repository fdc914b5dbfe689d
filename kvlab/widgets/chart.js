// A view of one chart. It draws what the trait `figure` holds at that moment, so that a view which comes late, twice, or while
// updates rush in ends with the last one. runtime.js stands before this file in the same module.
const HEIGHT = 320; // px, of a figure that names none
const LEAST = 40; // px that margins must leave an axis: plotly.js throws 'axis scaling' where they leave none
const HOVER_EVERY = 100; // ms

const CONFIG = { displayModeBar: false, displaylogo: false, responsive: false, typesetMath: false };

function tag(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children); // strings become text, never markup
  return node;
}

function themeOfPage() {
  const light = document.body.dataset.jpThemeLight; // JupyterLab, Notebook and Voila
  if (light === "true" || light === "false") return light === "true" ? "light" : "dark";
  if (document.body.dataset.vscodeThemeKind) return document.body.dataset.vscodeThemeKind.endsWith("light") ? "light" : "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

// The container gives the width, the figure the height, and neither lets the margins eat an axis.
function fitted(figure, width, textSize) {
  const { data, layout = {} } = structuredClone(figure); // plotly.js writes into what it is given
  const style = layout.template?.layout ?? {};
  const margin = { l: 80, r: 80, t: 100, b: 80, ...style.margin, ...layout.margin };
  layout.autosize = false;
  layout.width = Math.max(width, margin.l + margin.r + LEAST);
  layout.height = Math.max(layout.height ?? HEIGHT, margin.t + margin.b + LEAST);
  layout.font = { size: style.font?.size ?? textSize, ...layout.font };
  layout.uirevision ??= "kept"; // a reader's zoom outlives updates
  return { data, layout };
}

// What a point is, as JSON: plotly.js hands out slices of typed arrays and references to whole traces.
function plainPoint(event) {
  const point = event.points?.[0];
  if (!point) return {};
  const plain = (value) => (ArrayBuffer.isView(value) ? Array.from(value) : value);
  const index = point.pointNumber ?? point.pointIndex;
  const kept = { curve: point.curveNumber, point: index, x: point.x, y: point.y, z: point.z, text: point.text, id: point.id };
  kept.customdata = plain(point.customdata);
  kept.name = point.data?.name;
  return Object.fromEntries(Object.entries(kept).filter(([, value]) => value !== undefined));
}

function drawTable(model, region) {
  const { columns = [], rows = [], total = 0, error } = model.get("table");
  const words = model.get("words");
  if (error) return region.replaceChildren(tag("p", {}, error));
  if (!columns.length) return region.replaceChildren(tag("p", {}, words.no_data));
  const cell = (value) => tag("td", typeof value === "number" ? { class: "kvlab-number" } : {}, value === null ? "" : String(value));
  const shown = rows.length < total ? words.first_rows.replace("{shown}", rows.length).replace("{total}", total) : "";
  const caption = [model.get("alt"), shown].filter(Boolean).join(" · ");
  region.replaceChildren(
    tag(
      "table",
      {},
      tag("caption", {}, caption),
      tag("thead", {}, tag("tr", {}, ...columns.map((name) => tag("th", { scope: "col" }, name)))),
      tag("tbody", {}, ...rows.map((row) => tag("tr", {}, ...row.map(cell)))),
    ),
  );
}

function render({ model, el }) {
  const words = (key) => model.get("words")[key];
  const button = (key) => tag("button", { type: "button", title: words(`${key}_title`), "aria-label": words(`${key}_title`) }, words(key));
  const plot = tag("div", { class: "kvlab-plot", role: "img" });
  const note = tag("p", { class: "kvlab-note", role: "status" });
  const summary = tag("div", { class: "kvlab-summary" });
  const [png, svg, dataButton] = ["png", "svg", "data"].map(button);
  const controls = tag("div", { class: "kvlab-controls", role: "group", "aria-label": words("controls") }, png, svg, dataButton);
  const region = tag("div", { class: "kvlab-data", role: "region", tabindex: "0", "aria-label": words("data_title") });
  const root = tag("figure", { class: "kvlab-chart" }, plot, note, tag("figcaption", {}, summary, controls), region);
  el.append(root);

  let Plotly, waited, broken; // the library; whether patience is over; why it never came
  let drawing = false;
  let stale = false;
  const ends = []; // what to undo when the view goes
  const on = (names, handler) => {
    for (const name of names) model.on(name, handler);
    ends.push(() => names.forEach((name) => model.off(name, handler)));
  };
  const report = (changes) => {
    const news = Object.entries(changes).filter(([key, value]) => model.get(key) !== value);
    for (const [key, value] of news) model.set(key, value);
    if (news.length) model.save_changes();
  };

  const say = (text, { alert = false, action } = {}) => {
    note.setAttribute("role", alert ? "alert" : "status");
    note.replaceChildren(text, ...(action ? [" ", action] : []));
    note.hidden = !text;
    plot.hidden = Boolean(text);
    if (text) delete root.dataset.kvlabDrawn; // words stand there now, no revision
    png.disabled = svg.disabled = Boolean(text);
  };
  const failed = (error) => say(words("failed").replace("{why}", () => error?.message ?? String(error)), { alert: true });

  function waiting() {
    if (!waited) return say(words("waiting"));
    const action = tag("button", { type: "button" }, words("again"));
    action.onclick = () => fetchPlotly({ again: true });
    say(words("late").replace("{seconds}", model.get("patience")), { alert: true, action });
  }

  async function drawOnce() {
    const figure = model.get("figure");
    plot.setAttribute("aria-label", model.get("alt"));
    summary.textContent = model.get("summary");
    if (model.get("message")) return say(model.get("message"));
    if (!figure.data) return say(words("empty"));
    if (broken) return failed(broken);
    if (!Plotly) return waiting();
    const width = root.clientWidth;
    if (!root.isConnected || width === 0) return; // the resize observer calls again when it has one
    try {
      say("");
      const { data, layout } = fitted(figure, width, model.get("text_size"));
      plot.style.height = `${layout.height}px`;
      await Plotly.react(plot, data, layout, CONFIG);
      listen();
      root.dataset.kvlabDrawn = figure.revision;
      root.dataset.kvlabWidth = width;
    } catch (error) {
      Plotly.purge(plot); // half a picture is none; the next figure starts on a clean node
      listening = false;
      failed(error);
    }
  }

  // One at a time, and once more if anything came meanwhile: twenty updates a second cost as many drawings as the browser can do.
  async function draw() {
    stale = true;
    if (drawing) return;
    drawing = true;
    try {
      while (stale) {
        stale = false;
        await drawOnce();
      }
    } finally {
      drawing = false;
    }
  }

  let listening = false;
  let clicks = 0;
  let hoverTimer;
  function hover(point) {
    clearTimeout(hoverTimer);
    hoverTimer = setTimeout(() => {
      model.set("hovered", point);
      model.save_changes();
    }, HOVER_EVERY);
  }
  function listen() {
    if (listening) return;
    listening = true;
    plot.on("plotly_click", (event) => {
      clicks += 1; // a second click on the same point is news too
      model.set("clicked", { ...plainPoint(event), count: clicks });
      model.save_changes();
    });
    plot.on("plotly_hover", (event) => hover(plainPoint(event)));
    plot.on("plotly_unhover", () => hover({}));
  }

  function fetchPlotly(options) {
    plotlyFor(model, options).then(
      (library) => {
        [Plotly, broken] = [library, undefined];
        return draw();
      },
      (error) => {
        broken = error;
        return draw();
      },
    );
  }

  async function download(format) {
    const colour = getComputedStyle(document.body).backgroundColor;
    const paper = plot.layout.paper_bgcolor ?? "";
    const seen = /^rgba\(.*, ?0\)$|^transparent$|^$/.test(paper) ? colour : paper; // light text on no ground would be unreadable elsewhere
    const figure = { data: plot.data, layout: { ...plot.layout, paper_bgcolor: seen }, config: CONFIG };
    const { width, height } = plot.layout;
    try {
      await Plotly.downloadImage(figure, { format, width, height, scale: format === "png" ? 2 : 1, filename: model.get("filename") });
    } catch (error) {
      failed(error);
    }
  }
  png.onclick = () => download("png");
  svg.onclick = () => download("svg");

  function showData() {
    const open = model.get("data_open");
    dataButton.setAttribute("aria-expanded", open);
    region.hidden = !open;
    if (open) drawTable(model, region);
  }
  dataButton.onclick = () => report({ data_open: !model.get("data_open") });

  function reportPage() {
    report({ theme: themeOfPage(), text_size: Math.round(parseFloat(getComputedStyle(root).fontSize)) || model.get("text_size") });
  }

  on(["change:figure", "change:alt", "change:summary", "change:message", "change:text_size"], draw);
  on(["change:data_open", "change:table"], showData);

  const sizes = new ResizeObserver(() => {
    if (!root.clientWidth) return; // not on the page, or in a closed part of it
    reportPage();
    const { kvlabDrawn, kvlabWidth } = root.dataset;
    if (kvlabDrawn !== String(model.get("figure").revision) || kvlabWidth !== String(root.clientWidth)) draw();
  });
  sizes.observe(root);
  const looks = new MutationObserver(reportPage);
  looks.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
  looks.observe(document.documentElement, { attributes: true, attributeFilter: ["style"] });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", reportPage);
  const patience = setTimeout(() => {
    waited = true;
    if (!Plotly) draw();
  }, model.get("patience") * 1000);

  fetchPlotly();
  showData();
  draw();
  return () => {
    ends.forEach((end) => end());
    sizes.disconnect();
    looks.disconnect();
    dark.removeEventListener("change", reportPage);
    clearTimeout(patience);
    clearTimeout(hoverTimer);
    Plotly?.purge(plot);
  };
}

// anywidget gives a model two seconds to load its module and, when the page was busy for longer, drops every later message to it:
// the picture would stand still for good. A message that says nothing finds out; then messages go to the model straight, as they do in
// ipywidgets itself, and the kernel tells once more what was missed.
function mendMessages(model) {
  let raw;
  const take = (changed) => (raw = changed); // an event of Backbone brings the model itself
  model.on("change:_knock", take);
  model.set("_knock", 1);
  model.off("change:_knock", take);
  const straight = raw && Object.getPrototypeOf(Object.getPrototypeOf(raw))._handle_comm_msg;
  if (!straight || !raw.comm?.on_msg) return;
  raw._handle_comm_msg({ content: { data: { method: "knock" } } }).catch(() => {
    raw.comm.on_msg((message) => straight.call(raw, message));
    model.send({ want: "state" });
  });
}

export default {
  // Runs when the model comes, before any view: the library is on its way while cells still run. It must not be awaited here,
  // because anywidget holds back every message to a model until this returns.
  initialize({ model }) {
    model.on("msg:custom", (message, buffers) => {
      if (message.plotly_js) receivePlotly(message.plotly_js, buffers[0]);
    });
    setTimeout(() => {
      mendMessages(model);
      plotlyFor(model).catch(() => {}); // the views say it
    });
  },
  render,
};
