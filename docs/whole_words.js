// Keeps the words of code whole that a browser would part at a hyphen: --out, 1e-4, vit-pytorch. In the narrow columns
// of tables, long names may go on below after a mark, as in vit_base_16.|augreg_|in21k, and not within a word.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll("th code, td code")) {
    const parts = code.textContent.replaceAll("\\|", "|").split(/(?<=\S[._(,=|])/); // \| is GitHub's way to write |
    if (!code.children.length) code.replaceChildren(...parts.flatMap((part) => [part, document.createElement("wbr")]));
  }
  for (const code of document.querySelectorAll("code")) {
    const texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    const found = [];
    while (texts.nextNode()) if (texts.currentNode.data.includes("-")) found.push(texts.currentNode);
    for (const text of found) {
      const parts = text.data.split(/(\S*-\S*)/).map((part, i) => {
        if (i % 2 === 0 || part.length > 30) return part;
        const whole = document.createElement("span");
        whole.className = "whole";
        whole.textContent = part;
        return whole;
      });
      text.replaceWith(...parts);
    }
  }
});
