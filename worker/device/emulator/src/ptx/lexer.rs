//! Splits PTX text into tokens.

use super::error::PtxError;

/// A token with its line, from 1.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PtxToken {
    pub(super) kind: TokenKind,
    pub(super) line: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum TokenKind {
    /// A name, directive, register or instruction with its modifiers, such as `ld.global.f32`.
    Word(String),
    /// An integer.
    Integer(u64),
    /// The bits of a 32-bit float, written with `0f`.
    Float32(u32),
    /// The bits of a 64-bit float, written with `0d` or with a decimal point.
    Float64(u64),
    /// Text between quotation marks.
    Text(String),
    /// A single character.
    Mark(char),
}

/// Returns the tokens of a text.
pub(super) fn tokens(text: &str) -> Result<Vec<PtxToken>, PtxError> {
    let mut lexer = Lexer { rest: text, line: 1, tokens: Vec::new() };
    while lexer.step()? {}
    Ok(lexer.tokens)
}

struct Lexer<'a> {
    rest: &'a str,
    line: u32,
    tokens: Vec<PtxToken>,
}

impl Lexer<'_> {
    fn step(&mut self) -> Result<bool, PtxError> {
        let Some(first) = self.rest.chars().next() else { return Ok(false) };
        if first.is_whitespace() {
            self.take(first.len_utf8());
        } else if self.rest.starts_with("//") {
            self.take(self.rest.find('\n').unwrap_or(self.rest.len()));
        } else if self.rest.starts_with("/*") {
            let end = self.rest.find("*/").ok_or_else(|| self.error("comment without an end"))?;
            self.take(end + 2);
        } else if first == '"' {
            let end = self.rest[1..].find('"').ok_or_else(|| self.error("text without an end"))?;
            let text = self.rest[1..=end].to_owned();
            self.push(TokenKind::Text(text), end + 2);
        } else if first.is_ascii_digit() {
            self.number();
        } else if is_word(first) {
            let end = self.rest.find(|c| !is_word(c)).unwrap_or(self.rest.len());
            let word = self.rest[..end].to_owned();
            self.push(TokenKind::Word(word), end);
        } else {
            self.push(TokenKind::Mark(first), first.len_utf8());
        }
        Ok(true)
    }

    fn number(&mut self) {
        let end = self.rest.find(|c: char| !is_word(c)).unwrap_or(self.rest.len());
        let word = &self.rest[..end];
        let lower = word.to_ascii_lowercase();
        let digits = lower.trim_end_matches('u');
        let kind = if let Some(hex) = lower.strip_prefix("0f") {
            u32::from_str_radix(hex, 16).ok().map(TokenKind::Float32)
        } else if let Some(hex) = lower.strip_prefix("0d") {
            u64::from_str_radix(hex, 16).ok().map(TokenKind::Float64)
        } else if let Some(hex) = digits.strip_prefix("0x") {
            u64::from_str_radix(hex, 16).ok().map(TokenKind::Integer)
        } else if let Some(binary) = digits.strip_prefix("0b") {
            u64::from_str_radix(binary, 2).ok().map(TokenKind::Integer)
        } else if digits.contains('.') {
            digits.parse::<f64>().ok().map(|value| TokenKind::Float64(value.to_bits()))
        } else if digits.len() > 1 && digits.starts_with('0') {
            u64::from_str_radix(digits, 8).ok().map(TokenKind::Integer)
        } else {
            digits.parse().ok().map(TokenKind::Integer)
        };
        // A size such as `128B` is part of a hint: the parser decides where it may stand.
        let kind = kind.unwrap_or_else(|| TokenKind::Word(word.to_owned()));
        self.push(kind, end);
    }

    fn push(&mut self, kind: TokenKind, length: usize) {
        self.tokens.push(PtxToken { kind, line: self.line });
        self.take(length);
    }

    fn take(&mut self, length: usize) {
        self.line += self.rest[..length].matches('\n').count() as u32;
        self.rest = &self.rest[length..];
    }

    fn error(&self, message: &str) -> PtxError {
        PtxError::Syntax { line: self.line, message: message.to_owned() }
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%' | '.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_forms_of_ptx() {
        let text = "12 0x1F 0b101 017 0f3F800000 0d3FF0000000000000 7U";
        let kinds: Vec<TokenKind> = tokens(text).unwrap().into_iter().map(|t| t.kind).collect();
        assert_eq!(
            kinds,
            [
                TokenKind::Integer(12),
                TokenKind::Integer(31),
                TokenKind::Integer(5),
                TokenKind::Integer(15),
                TokenKind::Float32(1f32.to_bits()),
                TokenKind::Float64(1f64.to_bits()),
                TokenKind::Integer(7),
            ]
        );
    }

    #[test]
    fn lines_are_counted_through_comments() {
        let found = tokens("// one\n/* two\n three */ add.s32 %r1;\n").unwrap();
        assert_eq!(found[0].kind, TokenKind::Word("add.s32".to_owned()));
        assert_eq!(found[0].line, 3);
        assert!(tokens("/* open").is_err());
    }
}
