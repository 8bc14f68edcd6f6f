//! Parses the directives of a module: its target, variables and the heads of functions.

use super::body;
use super::error::PtxError;
use super::lexer::{PtxToken, TokenKind, tokens};
use super::syntax::{FunctionSyntax, Module, PtxInitializer, Variable, VariableSpace};
use crate::scalar::Type;

/// Parses a PTX text.
///
/// # Errors
///
/// Fails with [`PtxError`] if the text is not PTX that the interpreter can run.
pub fn parse(text: &str) -> Result<Module, PtxError> {
    let mut parser = Parser { tokens: tokens(text)?, at: 0 };
    let mut module = Module {
        lines: text.lines().map(|line| line.trim().to_owned()).collect(),
        ..Module::default()
    };
    while parser.peek().is_some() {
        parser.directive(&mut module)?;
    }
    if module.version == (0, 0) {
        return Err(PtxError::Target { directive: "no .version".to_owned() });
    }
    Ok(module)
}

/// Tokens and a place in them.
pub(super) struct Parser {
    tokens: Vec<PtxToken>,
    at: usize,
}

impl Parser {
    fn directive(&mut self, module: &mut Module) -> Result<(), PtxError> {
        let mut word = self.word()?;
        // Linkage makes no difference, for there is one module.
        while matches!(word.as_str(), ".visible" | ".extern" | ".weak" | ".common") {
            word = self.word()?;
        }
        match word.as_str() {
            ".version" => module.version = self.version()?,
            ".target" => module.target = self.target()?,
            ".address_size" => {
                let size = self.integer()?;
                if size != 64 {
                    return Err(PtxError::Target { directive: format!(".address_size {size}") });
                }
            }
            ".global" | ".const" | ".shared" => {
                let space = space_of(&word).ok_or_else(|| self.error("a state space"))?;
                module.variables.push(self.variable(space)?);
                self.expect(';')?;
            }
            ".entry" | ".func" => {
                if let Some(function) = self.function(word == ".entry")? {
                    module.functions.push(function);
                }
            }
            ".file" | ".pragma" => {
                while !self.eat(';') && !self.next_is_directive() {
                    self.next()?;
                }
            }
            _ => return Err(self.expected("a directive", &word)),
        }
        Ok(())
    }

    /// Whether the next token begins a directive, for those that end without a mark.
    fn next_is_directive(&self) -> bool {
        match self.peek() {
            Some(TokenKind::Word(word)) => word.starts_with('.'),
            None => true,
            Some(_) => false,
        }
    }

    fn version(&mut self) -> Result<(u32, u32), PtxError> {
        let token = self.next()?;
        let version = match token.kind {
            TokenKind::Float64(bits) => f64::from_bits(bits),
            TokenKind::Integer(major) => major as f64,
            _ => return Err(self.error("a version")),
        };
        let major = version.trunc();
        let minor = ((version - major) * 10.0).round();
        if !(6.0..10.0).contains(&major) {
            return Err(PtxError::Target { directive: format!(".version {version}") });
        }
        Ok((major as u32, minor as u32))
    }

    fn target(&mut self) -> Result<u32, PtxError> {
        let target = self.word()?;
        while self.eat(',') {
            self.word()?;
        }
        let number = target.strip_prefix("sm_").map(|n| n.trim_end_matches('a').parse::<u32>());
        match number {
            Some(Ok(number)) if number >= 30 => Ok(number),
            _ => Err(PtxError::Target { directive: format!(".target {target}") }),
        }
    }

    fn function(&mut self, is_entry: bool) -> Result<Option<FunctionSyntax>, PtxError> {
        let results = if self.eat('(') { self.parameters()? } else { Vec::new() };
        let name = self.word()?;
        let parameters = if self.eat('(') { self.parameters()? } else { Vec::new() };
        let mut threads_max = None;
        loop {
            if self.eat(';') {
                return Ok(None);
            }
            if self.eat('{') {
                break;
            }
            match self.word()?.as_str() {
                ".maxntid" | ".reqntid" => {
                    let counts = self.integers()?;
                    threads_max =
                        Some(counts.iter().fold(1u32, |all, &n| all.saturating_mul(n as u32)));
                }
                ".minnctapersm" | ".maxnctapersm" | ".maxnreg" => {
                    self.integers()?;
                }
                ".noreturn" => {}
                other => return Err(self.expected("the body of a function", other)),
            }
        }
        let body = body::statements(self)?;
        Ok(Some(FunctionSyntax { name, is_entry, parameters, results, threads_max, body }))
    }

    fn parameters(&mut self) -> Result<Vec<Variable>, PtxError> {
        let mut parameters = Vec::new();
        while !self.eat(')') {
            let word = self.word()?;
            if word != ".param" {
                return Err(self.expected("a parameter in the space .param", &word));
            }
            parameters.push(self.variable(VariableSpace::Parameter)?);
            self.eat(',');
        }
        Ok(parameters)
    }

    /// Parses a variable after its space: `.align 4 .b8 name[16] = {1, 2}`.
    pub(super) fn variable(&mut self, space: VariableSpace) -> Result<Variable, PtxError> {
        let mut align = 0;
        let mut of = None;
        let mut lanes = 1;
        let name = loop {
            let word = self.word()?;
            match word.as_str() {
                ".align" => align = self.alignment()?,
                ".v2" => lanes = 2,
                ".v4" => lanes = 4,
                // What a pointer parameter points to is a promise that nothing here relies on.
                ".ptr" | ".global" | ".shared" | ".const" | ".local" => {}
                _ => match word.strip_prefix('.').map(Type::parse) {
                    Some(Some(parsed)) => of = Some(parsed),
                    Some(None) => return Err(self.expected("a type", &word)),
                    None => break word,
                },
            }
        };
        let of = of.ok_or_else(|| self.error("a variable without a type"))?;
        let mut count = lanes;
        let mut dynamic = false;
        while self.eat('[') {
            if self.eat(']') {
                dynamic = true;
            } else {
                let elements = self.integer()? as usize;
                count = match usize::checked_mul(count, elements) {
                    Some(count) if count <= VARIABLE_ELEMENTS_MAX => count,
                    _ => return Err(self.error("variable too large")),
                };
                self.expect(']')?;
            }
        }
        let initializer = if self.eat('=') { Some(self.initializer(of)?) } else { None };
        let size = match &initializer {
            Some(initializer) if dynamic => initializer.bytes.len(),
            _ if dynamic => 0,
            _ => count * of.size(),
        };
        let dynamic = dynamic && initializer.is_none();
        Ok(Variable { name, space, size, align: align.max(of.size()), dynamic, initializer })
    }

    fn initializer(&mut self, of: Type) -> Result<PtxInitializer, PtxError> {
        let mut value = PtxInitializer::default();
        let mut depth = 0;
        loop {
            if self.eat('{') {
                depth += 1;
            } else if self.eat('}') {
                depth -= 1;
            } else if !self.eat(',') {
                self.initial_element(of, &mut value)?;
            }
            if depth == 0 {
                return Ok(value);
            }
        }
    }

    fn initial_element(&mut self, of: Type, value: &mut PtxInitializer) -> Result<(), PtxError> {
        let negative = self.eat('-');
        let bits = match self.next()?.kind {
            TokenKind::Integer(value) if negative => value.wrapping_neg(),
            TokenKind::Integer(value) => value,
            TokenKind::Float32(bits) => u64::from(bits),
            TokenKind::Float64(bits) => bits,
            TokenKind::Word(name) if name != "generic" && of.size() == 8 => {
                value.addresses.push((value.bytes.len(), name));
                0
            }
            TokenKind::Word(name) if name == "generic" => {
                self.expect('(')?;
                let name = self.word()?;
                self.expect(')')?;
                value.addresses.push((value.bytes.len(), name));
                0
            }
            _ => return Err(self.error("an initial value")),
        };
        value.bytes.extend_from_slice(&bits.to_le_bytes()[..of.size()]);
        Ok(())
    }

    fn alignment(&mut self) -> Result<usize, PtxError> {
        match self.integer()? {
            align if align.is_power_of_two() && align <= 4096 => Ok(align as usize),
            _ => Err(self.error("expected an alignment")),
        }
    }

    fn integers(&mut self) -> Result<Vec<u64>, PtxError> {
        let mut all = vec![self.integer()?];
        while self.eat(',') {
            all.push(self.integer()?);
        }
        Ok(all)
    }

    pub(super) fn integer(&mut self) -> Result<u64, PtxError> {
        match self.next()?.kind {
            TokenKind::Integer(value) => Ok(value),
            _ => Err(self.error("expected an integer")),
        }
    }

    pub(super) fn word(&mut self) -> Result<String, PtxError> {
        match self.next()?.kind {
            TokenKind::Word(word) => Ok(word),
            other => Err(self.error(&format!("expected a word, found {other:?}"))),
        }
    }

    pub(super) fn peek(&self) -> Option<&TokenKind> {
        self.tokens.get(self.at).map(|token| &token.kind)
    }

    pub(super) fn next(&mut self) -> Result<PtxToken, PtxError> {
        let token = self.tokens.get(self.at).cloned();
        self.at += 1;
        token.ok_or_else(|| self.error("the text ends too early"))
    }

    pub(super) fn eat(&mut self, mark: char) -> bool {
        let found = self.peek() == Some(&TokenKind::Mark(mark));
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect(&mut self, mark: char) -> Result<(), PtxError> {
        if self.eat(mark) { Ok(()) } else { Err(self.error(&format!("expected '{mark}'"))) }
    }

    /// The line of the next token, or of the last.
    pub(super) fn line(&self) -> u32 {
        let at = self.at.min(self.tokens.len().saturating_sub(1));
        self.tokens.get(at).map_or(0, |token| token.line)
    }

    pub(super) fn error(&self, message: &str) -> PtxError {
        let at = self.at.saturating_sub(1).min(self.tokens.len().saturating_sub(1));
        let line = self.tokens.get(at).map_or(0, |token| token.line);
        PtxError::Syntax { line, message: message.to_owned() }
    }

    pub(super) fn expected(&self, what: &str, found: &str) -> PtxError {
        self.error(&format!("expected {what}, found {found}"))
    }
}

/// The most elements of a variable. Memory for larger data is allocated by the host.
const VARIABLE_ELEMENTS_MAX: usize = 1 << 28;

/// Returns the space of a directive such as `.shared`.
pub(super) fn space_of(word: &str) -> Option<VariableSpace> {
    Some(match word {
        ".global" => VariableSpace::Global,
        ".const" => VariableSpace::Constant,
        ".shared" => VariableSpace::Shared,
        ".local" => VariableSpace::Local,
        ".param" => VariableSpace::Parameter,
        _ => return None,
    })
}
