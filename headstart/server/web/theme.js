// Light or dark theme: the system's setting until the user chooses. Runs before the first paint.
(() => {
  const root = document.documentElement;
  const kept = localStorage.getItem("headstart.theme");
  if (kept) root.dataset.theme = kept;
  globalThis.theme = {
    get isDark() {
      const own = root.dataset.theme;
      return own ? own === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    },
    toggle() {
      root.dataset.theme = this.isDark ? "light" : "dark";
      localStorage.setItem("headstart.theme", root.dataset.theme);
      dispatchEvent(new Event("themechange"));
    },
  };
})();
