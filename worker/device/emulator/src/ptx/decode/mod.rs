//! Decodes the statements of a function: names become places.

mod arithmetic;
mod control;
mod memory;
mod operands;
mod warp;

use std::collections::HashMap;

use super::error::PtxError;
use super::instruction::{Guard, Instruction, PtxOperation, Register, Special, ZERO};
use super::layout::Layout;
use super::program::{KernelParameter, LinkedFunction, Symbols};
use super::syntax::{FunctionSyntax, InstructionSyntax, Module, Statement, VariableSpace};
use crate::scalar::Type;

pub(crate) use memory::{LOCAL_WINDOW, SHARED_WINDOW};

/// Decodes a function. Returns its code and the places of its parameters.
pub(super) fn decode(
    module: &Module,
    function: &FunctionSyntax,
    symbols: &Symbols<'_>,
) -> Result<(LinkedFunction, Vec<KernelParameter>), PtxError> {
    let mut decoder = Decoder::new(module, function, symbols);
    let parameters = decoder.declare_parameters();
    for statement in &function.body {
        decoder.statement(statement)?;
    }
    decoder.emit(PtxOperation::Return);
    decoder.resolve_branches()?;
    decoder.code.parameters = decoder.parameters.size();
    Ok((decoder.code, parameters))
}

struct Decoder<'a> {
    module: &'a Module,
    function: &'a FunctionSyntax,
    symbols: &'a Symbols<'a>,
    /// The names of each open block, the innermost last.
    scopes: Vec<HashMap<String, Name>>,
    constants: HashMap<u64, Register>,
    specials: HashMap<Special, Register>,
    parameters: Layout,
    labels: HashMap<String, u32>,
    targets: HashMap<String, Vec<String>>,
    last_label: String,
    /// Branches whose target is filled in at the end: the instruction, its line and labels.
    branches: Vec<(usize, u32, Vec<String>)>,
    line: u32,
    guard: Option<Guard>,
    code: LinkedFunction,
}

/// The meaning of a name inside a function.
#[derive(Clone, Copy, Debug)]
enum Name {
    Register(Register, Type),
    /// An offset in local memory.
    Local(i64),
    /// An offset in the parameters, and the size.
    Parameter(i64, u32),
}

impl<'a> Decoder<'a> {
    fn new(
        module: &'a Module,
        function: &'a FunctionSyntax,
        symbols: &'a Symbols<'a>,
    ) -> Decoder<'a> {
        Decoder {
            module,
            function,
            symbols,
            scopes: vec![HashMap::new()],
            constants: HashMap::from([(0, ZERO)]),
            specials: HashMap::new(),
            parameters: Layout::default(),
            labels: HashMap::new(),
            targets: HashMap::new(),
            last_label: String::new(),
            branches: Vec::new(),
            line: 0,
            guard: None,
            code: LinkedFunction { registers: 2, ..LinkedFunction::default() },
        }
    }

    /// Places results and parameters, results first, as the callers of a function do.
    fn declare_parameters(&mut self) -> Vec<KernelParameter> {
        let function = self.function;
        let mut places = Vec::new();
        for (at, variable) in function.results.iter().chain(&function.parameters).enumerate() {
            let offset = self.parameters.append(variable);
            let name = Name::Parameter(offset as i64, variable.size as u32);
            self.declare(&variable.name, name);
            if at >= function.results.len() {
                places.push(KernelParameter { offset, size: variable.size });
            }
        }
        places
    }

    fn statement(&mut self, statement: &Statement) -> Result<(), PtxError> {
        match statement {
            Statement::Open => self.scopes.push(HashMap::new()),
            Statement::Close => {
                self.scopes.pop();
            }
            Statement::Label(label) => {
                let at = self.code.instructions.len() as u32;
                if self.labels.insert(label.clone(), at).is_some() {
                    let message = format!("label {label} is declared twice");
                    return Err(PtxError::Syntax { line: self.line, message });
                }
                self.last_label.clone_from(label);
            }
            Statement::Targets(targets) => {
                self.targets.insert(self.last_label.clone(), targets.clone());
            }
            Statement::Registers { of, prefix, count, line } => {
                self.line = *line;
                match count {
                    None => {
                        let register = self.new_register();
                        self.declare(prefix, Name::Register(register, *of));
                    }
                    Some(count) => {
                        for at in 0..*count {
                            let register = self.new_register();
                            let name = Name::Register(register, *of);
                            self.declare(&format!("{prefix}{at}"), name);
                        }
                    }
                }
            }
            Statement::Variable(variable) => match variable.space {
                VariableSpace::Parameter => {
                    let offset = self.parameters.append(variable);
                    let name = Name::Parameter(offset as i64, variable.size as u32);
                    self.declare(&variable.name, name);
                }
                VariableSpace::Local => {
                    let offset = self.code.local.place(variable) as i64;
                    self.declare(&variable.name, Name::Local(offset));
                }
                // Linked before the function, for their offsets hold for the whole kernel.
                VariableSpace::Shared => {}
                VariableSpace::Global | VariableSpace::Constant => {
                    let message = format!("variable {} inside a function", variable.name);
                    return Err(PtxError::Syntax { line: self.line, message });
                }
            },
            Statement::Instruction(written) => self.instruction(written)?,
        }
        Ok(())
    }

    fn instruction(&mut self, written: &InstructionSyntax) -> Result<(), PtxError> {
        self.line = written.line;
        self.guard = match &written.guard {
            Some((name, negated)) => {
                Some(Guard { register: self.register(name)?.0, negated: *negated })
            }
            None => None,
        };
        let known = match written.words[0].as_str() {
            "ld" | "ldu" | "st" | "atom" | "red" | "cvta" | "isspacep" | "membar" | "fence"
            | "prefetch" | "prefetchu" => self.memory(written)?,
            "bra" | "brx" | "call" | "ret" | "exit" | "trap" | "brkpt" | "nanosleep" | "bar"
            | "barrier" => self.control(written)?,
            "shfl" | "vote" | "match" | "activemask" => self.warp(written)?,
            _ => self.arithmetic(written)?,
        };
        self.guard = None;
        if known.is_none() { Err(self.unknown()) } else { Ok(()) }
    }

    /// Appends an operation under the guard of the instruction that is decoded.
    fn emit(&mut self, operation: PtxOperation) {
        let instruction = Instruction { line: self.line, guard: self.guard, operation };
        self.code.instructions.push(instruction);
    }

    fn declare(&mut self, name: &str, meaning: Name) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name.to_owned(), meaning);
        }
    }

    fn resolve_branches(&mut self) -> Result<(), PtxError> {
        for (at, line, labels) in std::mem::take(&mut self.branches) {
            let mut places = Vec::new();
            for label in labels {
                let place = self.labels.get(&label).copied();
                places.push(place.ok_or(PtxError::UnknownName { line, name: label })?);
            }
            match &mut self.code.instructions[at].operation {
                PtxOperation::Branch { target } => *target = places[0],
                PtxOperation::BranchTable { targets, .. } => *targets = places.into(),
                _ => {}
            }
        }
        Ok(())
    }

    /// The error for the instruction that is decoded.
    fn unknown(&self) -> PtxError {
        PtxError::UnknownInstruction { line: self.line, text: self.text() }
    }

    fn text(&self) -> String {
        let line = (self.line as usize).saturating_sub(1);
        self.module.lines.get(line).cloned().unwrap_or_default()
    }
}
