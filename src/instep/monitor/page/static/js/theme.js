// Light, dark, or as the system says.

const CHOICES = ["auto", "light", "dark"];
const KEY = "instep-theme";

export function startTheme(button, onChange) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let choice = localStorage.getItem(KEY) ?? "auto";
  const apply = () => {
    document.documentElement.dataset.theme = choice === "auto" ? (system.matches ? "dark" : "light") : choice;
    button.textContent = `◐ ${choice}`;
    onChange();
  };
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    localStorage.setItem(KEY, choice);
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}
