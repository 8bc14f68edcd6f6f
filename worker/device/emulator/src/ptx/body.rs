//! Parses the statements of a function.

use super::error::PtxError;
use super::lexer::TokenKind;
use super::parser::{Parser, space_of};
use super::syntax::{InstructionSyntax, Operand, Statement};
use crate::scalar::Type;

/// Parses the statements up to the brace that ends a function.
pub(super) fn statements(parser: &mut Parser) -> Result<Vec<Statement>, PtxError> {
    let mut statements = Vec::new();
    let mut depth = 0;
    loop {
        if parser.eat('}') {
            if depth == 0 {
                return Ok(statements);
            }
            depth -= 1;
            statements.push(Statement::Close);
        } else if parser.eat('{') {
            depth += 1;
            statements.push(Statement::Open);
        } else if !parser.eat(';') {
            statement(parser, &mut statements)?;
        }
    }
}

fn statement(parser: &mut Parser, statements: &mut Vec<Statement>) -> Result<(), PtxError> {
    let line = parser.line();
    let guard = if parser.eat('@') {
        let negated = parser.eat('!');
        Some((parser.word()?, negated))
    } else {
        None
    };
    let mut word = parser.word()?;
    while parser.eat(':') {
        if !parser.eat(':') {
            statements.push(Statement::Label(word));
            return Ok(());
        }
        // A modifier such as `L2::128B` is a hint for caches. What follows it counts.
        word.push_str(hint_tail(&parser.next()?.kind));
    }
    match word.as_str() {
        ".reg" => return registers(parser, line, statements),
        ".pragma" | ".loc" | ".file" => {
            // Hints for compilers and debuggers. A location has no mark at its end.
            let on_line = |parser: &Parser| parser.peek().is_some() && parser.line() == line;
            while on_line(parser) && !parser.eat(';') {
                parser.next()?;
            }
            return Ok(());
        }
        _ => {}
    }
    if let Some(space) = space_of(&word) {
        let variable = parser.variable(space)?;
        statements.push(Statement::Variable(variable));
        return parser.expect(';');
    }
    if word == ".branchtargets" {
        let mut targets = Vec::new();
        while !parser.eat(';') {
            targets.push(parser.word()?);
            parser.eat(',');
        }
        statements.push(Statement::Targets(targets));
        return Ok(());
    }
    let words: Vec<String> = word.split('.').map(str::to_owned).collect();
    let mut operands = Vec::new();
    while !parser.eat(';') {
        operands.push(operand(parser)?);
        parser.eat(',');
    }
    statements.push(Statement::Instruction(InstructionSyntax { line, guard, words, operands }));
    Ok(())
}

/// The modifiers after one with colons: a size such as `128B` ends at the next point.
fn hint_tail(after: &TokenKind) -> &str {
    match after {
        TokenKind::Word(word) => word.find('.').map_or("", |at| &word[at..]),
        _ => "",
    }
}

fn registers(
    parser: &mut Parser,
    line: u32,
    statements: &mut Vec<Statement>,
) -> Result<(), PtxError> {
    let word = parser.word()?;
    let of = word.strip_prefix('.').and_then(Type::parse);
    let of = of.ok_or_else(|| parser.expected("the type of a register", &word))?;
    loop {
        let prefix = parser.word()?;
        let count = if parser.eat('<') {
            let count = match parser.integer()? {
                count if count <= REGISTERS_MAX => count as u32,
                _ => return Err(parser.error("too many registers")),
            };
            parser.expect('>')?;
            Some(count)
        } else {
            None
        };
        statements.push(Statement::Registers { of, prefix, count, line });
        if !parser.eat(',') {
            return parser.expect(';');
        }
    }
}

fn operand(parser: &mut Parser) -> Result<Operand, PtxError> {
    if parser.eat('{') {
        return Ok(Operand::List(list(parser, '}')?));
    }
    if parser.eat('(') {
        return Ok(Operand::List(list(parser, ')')?));
    }
    if parser.eat('[') {
        return address(parser);
    }
    if parser.eat('!') {
        return Ok(Operand::Not(parser.word()?));
    }
    let negative = parser.eat('-');
    let token = parser.next()?;
    Ok(match token.kind {
        TokenKind::Word(name) if parser.eat('|') => Operand::Pair(name, parser.word()?),
        TokenKind::Word(name) if parser.eat('+') => {
            Operand::Address { base: Some(name), offset: parser.integer()? as i64 }
        }
        TokenKind::Word(name) => Operand::Name(name),
        TokenKind::Integer(value) if negative => Operand::Integer(-i128::from(value)),
        TokenKind::Integer(value) => Operand::Integer(i128::from(value)),
        TokenKind::Float32(bits) => Operand::Float32(bits ^ u32::from(negative) << 31),
        TokenKind::Float64(bits) => Operand::Float64(bits ^ u64::from(negative) << 63),
        other => return Err(parser.error(&format!("expected an operand, found {other:?}"))),
    })
}

fn list(parser: &mut Parser, end: char) -> Result<Vec<Operand>, PtxError> {
    let mut operands = Vec::new();
    while !parser.eat(end) {
        operands.push(operand(parser)?);
        parser.eat(',');
    }
    Ok(operands)
}

fn address(parser: &mut Parser) -> Result<Operand, PtxError> {
    let base = match parser.peek() {
        Some(TokenKind::Word(_)) => Some(parser.word()?),
        _ => None,
    };
    let mut offset = 0i64;
    while !parser.eat(']') {
        parser.eat('+');
        let negative = parser.eat('-');
        let value = parser.integer()? as i64;
        offset = offset.wrapping_add(if negative { value.wrapping_neg() } else { value });
    }
    Ok(Operand::Address { base, offset })
}

/// The most registers of one name in a function.
const REGISTERS_MAX: u64 = 1 << 16;
