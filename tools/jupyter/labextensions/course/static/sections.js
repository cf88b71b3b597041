// Links to a section land on it. JupyterLab scrolls once, as soon as the cells are there; those
// above the section then turn out higher or lower than it guessed, and the section moves away. Here
// it scrolls again until nothing moves any more, or until the reader does something.
//
// A lesson and its solution have one name in two folders, and so would their tabs. Here the tab of
// a solution says so.
//
// A JupyterLab extension is a module of webpack's federation, and this is one without webpack:
// `init` is given the modules that JupyterLab shares, `get` returns the extension.

(() => {
  const TURN_MS = 150;
  const TURNS = 40; // six seconds, after which the page is left where it is
  const AT_REST = 4; // turns in which nothing has moved

  const turn = () => new Promise(resolve => setTimeout(resolve, TURN_MS));

  function top(notebook, fragment) {
    const id = fragment.replace("#cell-id=", "");
    const cell = notebook.widgets.find(widget => widget.model.id === id);
    return cell?.node.isConnected ? Math.round(cell.node.getBoundingClientRect().top) : null;
  }

  async function land(panel, fragment) {
    const notebook = panel.content;
    await panel.context.ready;
    if (!fragment.startsWith("#cell-id=")) {
      return notebook.setFragment(fragment);
    }
    let reads = false;
    const stop = () => (reads = true);
    const signs = ["wheel", "pointerdown", "keydown"];
    signs.forEach(sign => panel.node.addEventListener(sign, stop));
    let before = null;
    let still = 0;
    for (let turns = 0; turns < TURNS && still < AT_REST && !reads && !panel.isDisposed; turns++) {
      await notebook.setFragment(fragment);
      await turn();
      const now = top(notebook, fragment);
      still = now !== null && now === before ? still + 1 : 0;
      before = now;
    }
    signs.forEach(sign => panel.node.removeEventListener(sign, stop));
  }

  // JupyterLab sets the title when the file is opened, renamed or moved, and tells of each change.
  function name(panel) {
    const { title, context } = panel;
    const isNamed = title.label.startsWith("solution ");
    if (context.path.startsWith("solutions/") && !isNamed) {
      title.label = `solution ${title.label}`;
    }
  }

  let shared = {};

  async function extension() {
    const [{ get }] = Object.values(shared["@jupyterlab/notebook"]);
    const { INotebookTracker, NotebookPanel } = (await get())();

    function activate(app, tracker) {
      NotebookPanel.prototype.setFragment = function (fragment) {
        return land(this, fragment);
      };
      tracker.widgetAdded.connect((_, panel) => {
        name(panel);
        panel.title.changed.connect(() => name(panel));
      });
    }

    return { id: "course:notebooks", autoStart: true, requires: [INotebookTracker], activate };
  }

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB.course = {
    init: scope => (shared = scope),
    get: async () => {
      const plugin = await extension();
      return () => plugin;
    }
  };
})();
