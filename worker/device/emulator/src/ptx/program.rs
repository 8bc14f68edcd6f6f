//! [`Program`]: the linked functions of a module.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::decode::decode;
use super::error::PtxError;
use super::instruction::{Instruction, Register, Special};
use super::layout::Layout;
use super::syntax::{FunctionSyntax, Module, Variable, VariableSpace};

/// The linked functions of a module.
#[derive(Clone, Debug)]
pub struct Program {
    /// All functions. Calls name them by their index.
    pub(crate) functions: Vec<LinkedFunction>,
    /// The kernels by their names.
    pub kernels: HashMap<String, Kernel>,
    /// The lines of the text, for messages.
    pub lines: Arc<[String]>,
}

/// A function as the interpreter runs it.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinkedFunction {
    pub(crate) instructions: Vec<Instruction>,
    /// The number of registers, with constants and special ones.
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
    pub parameters: Vec<KernelParameter>,
    /// The static variables in shared memory, also those that only other kernels use.
    pub(crate) shared: Layout,
    shared_bytes: usize,
    /// The most threads of a block, if the kernel names them.
    pub threads_max: Option<u32>,
}

impl Kernel {
    /// The bytes of static shared memory, as a launch counts them.
    pub fn shared_size(&self) -> usize {
        self.shared_bytes
    }
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelParameter {
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
    // What several kernels may use has the same offsets in each of them.
    let common: Vec<&Variable> = common_shared(module).collect();
    for (index, function) in module.functions.iter().enumerate() {
        let own =
            if function.is_entry { function.shared_variables().collect() } else { Vec::new() };
        let all = || common.iter().chain(&own).copied();
        let mut shared = Layout::default();
        let mut offsets = HashMap::new();
        for variable in all().filter(|variable| !variable.dynamic) {
            offsets.insert(variable.name.clone(), shared.place(variable) as u64);
        }
        for variable in all().filter(|variable| variable.dynamic) {
            offsets.insert(variable.name.clone(), shared.dynamic_start() as u64);
        }
        let symbols = Symbols { addresses, shared: offsets, functions: &module.functions };
        let (code, parameters) = decode(module, function, &symbols)?;
        functions.push(code);
        if function.is_entry {
            let used = names_used(module, function);
            let mut shared_used = Layout::default();
            for variable in all().filter(|variable| used.contains(variable.name.as_str())) {
                shared_used.append(variable);
            }
            let kernel = Kernel {
                name: function.name.clone(),
                function: index,
                parameters,
                shared,
                shared_bytes: shared_used.size(),
                threads_max: function.threads_max,
            };
            kernels.insert(function.name.clone(), kernel);
        }
    }
    Ok(Program { functions, kernels, lines: module.lines.clone().into() })
}

/// The variables in shared memory that are not of one kernel alone.
fn common_shared(module: &Module) -> impl Iterator<Item = &Variable> {
    let outside = module.variables.iter().filter(|v| v.space == VariableSpace::Shared);
    let called = module.functions.iter().filter(|function| !function.is_entry);
    outside.chain(called.flat_map(FunctionSyntax::shared_variables))
}

/// The names that a kernel and the functions that it calls use.
fn names_used<'a>(module: &'a Module, kernel: &'a FunctionSyntax) -> HashSet<&'a str> {
    let mut used = HashSet::new();
    let mut pending = vec![kernel];
    while let Some(function) = pending.pop() {
        for name in function.names_used() {
            if used.insert(name) {
                pending.extend(module.functions.iter().filter(|other| other.name == name));
            }
        }
    }
    used
}

/// The meanings of the names that a function uses and a module declares.
pub(super) struct Symbols<'a> {
    pub(super) addresses: &'a HashMap<String, u64>,
    pub(super) shared: HashMap<String, u64>,
    pub(super) functions: &'a [FunctionSyntax],
}
