// One plotly.js for the whole page, whoever brings it. A page may have loaded it ahead (`kvlabPlotly`, a promise: our Voila template).
// Elsewhere the first chart of a kernel brings it in a message right after itself, which comes even while the kernel is busy with
// cells; a page that comes later asks for it. Messages, no trait: a trait of 4.8 MB would be saved into every notebook, and come once a
// chart. What is shared lies behind a symbol of the page, one entry a version, so that charts of two kernels, of a restarted kernel
// and late ones all find what is already there.
const ASK_AFTER = 400; // ms for what the kernel may have sent by itself

const page = (globalThis[Symbol.for("kvlab.plotly")] ??= new Map());

function entryOf(version) {
  if (!page.has(version)) {
    const entry = { asked: new Set(), started: false };
    entry.plotly = new Promise((resolve, reject) => Object.assign(entry, { resolve, reject }));
    entry.plotly.catch(() => page.delete(version)); // the next chart that asks starts afresh
    entry.ahead = Promise.resolve(globalThis.kvlabPlotly).then((library) => {
      if (library?.version !== version) return;
      entry.started = true;
      entry.resolve(library);
    });
    page.set(version, entry);
  }
  return page.get(version);
}

// The page's plotly.js, asked for once a kernel: a kernel may have died before it answered, another one has not.
function plotlyFor(model, { again = false } = {}) {
  const entry = entryOf(model.get("plotly_js_version"));
  const kernel = model.get("kernel");
  entry.ahead.then(() => {
    if (entry.asked.has(kernel) && !again) return;
    entry.asked.add(kernel);
    setTimeout(() => entry.started || model.send({ want: "plotly.js" }), again ? 0 : ASK_AFTER);
  });
  return entry.plotly;
}

async function receivePlotly(version, gzipped) {
  const entry = entryOf(version);
  if (entry.started) return; // it answers another tab, or the second of two kernels
  entry.started = true;
  const before = Object.getOwnPropertyDescriptor(globalThis, "Plotly");
  try {
    const source = await new Response(new Blob([gzipped]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    // A module of its own, where the library finds `module` and no AMD loader, and leaves another Plotly of the page alone.
    const text = `const module = {exports: {}}, define = undefined;\n${source}\nexport default module.exports;`;
    const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
    const library = await import(url);
    URL.revokeObjectURL(url);
    entry.resolve(library.default);
  } catch (error) {
    entry.reject(error);
  } finally {
    if (before) Object.defineProperty(globalThis, "Plotly", before);
    else delete globalThis.Plotly;
  }
}
