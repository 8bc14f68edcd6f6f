//! [`Program`]: the linked functions of a module.

use std::collections::HashMap;
use std::sync::Arc;

use super::decode::decode;
use super::error::PtxError;
use super::instruction::{Instruction, Register, Special};
use super::layout::Layout;
use super::syntax::{Module, VariableSpace};

/// The linked functions of a module.
#[derive(Clone, Debug)]
pub struct Program {
    /// All functions. Calls name them by their index.
    pub(crate) functions: Vec<Code>,
    /// The kernels by their names.
    pub kernels: HashMap<String, Kernel>,
    /// The lines of the text, for messages.
    pub lines: Arc<[String]>,
}

/// A function as the interpreter runs it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Code {
    pub(crate) instructions: Vec<Instruction>,
    /// How many registers there are, with constants and special ones.
    pub(crate) registers: usize,
    pub(crate) constants: Vec<(Register, u64)>,
    pub(crate) specials: Vec<(Register, Special)>,
    /// The variables in local memory.
    pub(crate) local: Layout,
    /// The bytes of parameters, results and the arguments of calls.
    pub(crate) parameters: usize,
}

/// A kernel of a program.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The name.
    pub name: String,
    /// The index among the functions.
    pub(crate) function: usize,
    /// The parameters in their order.
    pub parameters: Vec<Parameter>,
    /// The static variables in shared memory.
    pub(crate) shared: Layout,
    /// The most threads of a block, if the kernel names them.
    pub threads_max: Option<u32>,
}

impl Kernel {
    /// The bytes of static shared memory, as a launch counts them.
    pub fn shared_size(&self) -> usize {
        self.shared.used
    }
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The offset in bytes.
    pub offset: usize,
    /// The size in bytes.
    pub size: usize,
}

/// Links a module whose global and constant variables have the given addresses.
///
/// # Errors
///
/// Fails with [`PtxError`] if an instruction or name is not known.
pub fn link(module: &Module, addresses: &HashMap<String, u64>) -> Result<Program, PtxError> {
    let mut functions = Vec::new();
    let mut kernels = HashMap::new();
    for (index, function) in module.functions.iter().enumerate() {
        // Variables outside of functions have the same offsets in each kernel.
        let mut shared = Layout::default();
        let mut symbols =
            Symbols { addresses, shared: HashMap::new(), functions: &module.functions };
        let outside = module.variables.iter().filter(|v| v.space == VariableSpace::Shared);
        for variable in outside.filter(|variable| !variable.dynamic) {
            let offset = shared.place(variable);
            symbols.shared.insert(variable.name.clone(), offset as u64);
        }
        for variable in function.shared_variables().filter(|variable| !variable.dynamic) {
            let offset = shared.place(variable);
            symbols.shared.insert(variable.name.clone(), offset as u64);
        }
        let outside = module.variables.iter().filter(|v| v.space == VariableSpace::Shared);
        for variable in outside.chain(function.shared_variables()).filter(|v| v.dynamic) {
            symbols.shared.insert(variable.name.clone(), shared.dynamic_start() as u64);
        }
        let (code, parameters) = decode(module, function, &symbols)?;
        functions.push(code);
        if function.is_entry {
            let name = function.name.clone();
            let threads_max = function.threads_max;
            let kernel =
                Kernel { name: name.clone(), function: index, parameters, shared, threads_max };
            kernels.insert(name, kernel);
        }
    }
    Ok(Program { functions, kernels, lines: module.lines.clone().into() })
}

/// What names outside of a function mean in it.
pub(super) struct Symbols<'a> {
    pub(super) addresses: &'a HashMap<String, u64>,
    pub(super) shared: HashMap<String, u64>,
    pub(super) functions: &'a [super::syntax::Function],
}
