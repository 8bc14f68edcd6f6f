//! The syntax of a PTX module, with names as they are written.

use crate::scalar::Type;

/// A PTX module.
#[derive(Clone, Debug, Default)]
pub struct Module {
    /// The version of the language, such as `(8, 0)`.
    pub version: (u32, u32),
    /// The compute capability of the target, such as 70.
    pub target: u32,
    /// The variables outside of functions.
    pub variables: Vec<Variable>,
    /// The functions that have a body.
    pub functions: Vec<FunctionSyntax>,
    /// The lines of the text, for messages.
    pub lines: Vec<String>,
}

/// The memory space of a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of PTX")]
pub enum VariableSpace {
    Global,
    Constant,
    Shared,
    Local,
    Parameter,
}

/// A variable.
#[derive(Clone, Debug)]
pub struct Variable {
    /// The name.
    pub name: String,
    /// The memory space.
    pub space: VariableSpace,
    /// The size in bytes. Dynamic shared memory has none.
    pub size: usize,
    /// The alignment in bytes.
    pub align: usize,
    /// Whether the size is given by the launch.
    pub dynamic: bool,
    /// The initial value, if one is given.
    pub initializer: Option<PtxInitializer>,
}

/// The initial value of a variable.
#[derive(Clone, Debug, Default)]
pub struct PtxInitializer {
    /// The bytes. Missing ones are zero.
    pub bytes: Vec<u8>,
    /// Names whose addresses are stored, each at an offset.
    pub addresses: Vec<(usize, String)>,
}

/// A function with a body.
#[derive(Clone, Debug)]
pub struct FunctionSyntax {
    /// The name.
    pub name: String,
    /// Whether it is a kernel.
    pub is_entry: bool,
    /// The parameters in their order.
    pub parameters: Vec<Variable>,
    /// The returned values in their order.
    pub results: Vec<Variable>,
    /// The most threads of a block, from `.maxntid`, if that is given.
    pub threads_max: Option<u32>,
    /// The statements.
    pub(super) body: Vec<Statement>,
}

impl FunctionSyntax {
    /// The variables in shared memory that are declared in the body.
    pub(super) fn shared_variables(&self) -> impl Iterator<Item = &Variable> {
        self.body.iter().filter_map(|statement| match statement {
            Statement::Variable(variable) if variable.space == VariableSpace::Shared => {
                Some(variable)
            }
            _ => None,
        })
    }

    /// The names in operands, among them those of variables and called functions.
    pub(super) fn names_used(&self) -> Vec<&str> {
        let mut names = Vec::new();
        for statement in &self.body {
            if let Statement::Instruction(written) = statement {
                written.operands.iter().for_each(|operand| operand.names(&mut names));
            }
        }
        names
    }
}

/// A statement of a function.
#[derive(Clone, Debug)]
pub(super) enum Statement {
    Open,
    Close,
    Label(String),
    /// The targets of the label before, for an indexed branch.
    Targets(Vec<String>),
    Registers {
        of: Type,
        prefix: String,
        count: Option<u32>,
        line: u32,
    },
    Variable(Variable),
    Instruction(InstructionSyntax),
}

/// An instruction as it is written.
#[derive(Clone, Debug)]
pub(super) struct InstructionSyntax {
    pub(super) line: u32,
    /// The register of the guard, and whether it is negated.
    pub(super) guard: Option<(String, bool)>,
    /// The name and its modifiers, split at their points.
    pub(super) words: Vec<String>,
    pub(super) operands: Vec<Operand>,
}

/// An operand as it is written.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Operand {
    /// A register, label, variable or special register.
    Name(String),
    /// A predicate that is negated.
    Not(String),
    Integer(i128),
    Float32(u32),
    Float64(u64),
    /// `{a, b}`, or the operands of a call between parentheses.
    List(Vec<Operand>),
    /// `a|b`: two destinations.
    Pair(String, String),
    /// `[base + offset]`.
    Address {
        base: Option<String>,
        offset: i64,
    },
}

impl Operand {
    fn names<'a>(&'a self, names: &mut Vec<&'a str>) {
        match self {
            Operand::Name(name) | Operand::Address { base: Some(name), .. } => names.push(name),
            Operand::List(operands) => operands.iter().for_each(|operand| operand.names(names)),
            _ => {}
        }
    }
}
