//! [`LoadedModule`]: a module whose variables are in device memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::code::DriverErrorCode;
use super::device::EmulatedDevice;
use super::settings::Settings;
use crate::ptx::{Program, VariableSpace, link, parse};

/// A module whose variables are in device memory.
#[derive(Clone, Debug)]
pub(crate) struct LoadedModule {
    pub(crate) context: u64,
    pub(crate) program: Arc<Program>,
    /// The addresses and sizes of its variables.
    pub(crate) variables: BTreeMap<String, (u64, usize)>,
    /// The handles of functions that were looked up.
    pub(crate) functions: BTreeMap<String, u64>,
}

/// Why a module is refused: the code, and the text of the compiler's log.
pub(crate) type ModuleLoadError = (DriverErrorCode, String);

/// Loads PTX text.
pub(crate) fn load(
    text: &str,
    context: u64,
    device: &mut EmulatedDevice,
    settings: &Settings,
) -> Result<LoadedModule, ModuleLoadError> {
    let invalid = |error: crate::ptx::PtxError| (DriverErrorCode::INVALID_PTX, error.to_string());
    let module = parse(text).map_err(invalid)?;
    if module.version > settings.ptx_version() {
        let message = format!(
            "PTX version {:?} with a driver for {:?}",
            module.version,
            settings.ptx_version()
        );
        return Err((DriverErrorCode::UNSUPPORTED_PTX_VERSION, message));
    }
    if module.target > settings.compute_capability {
        let message = format!("target sm_{} on sm_{}", module.target, settings.compute_capability);
        return Err((DriverErrorCode::NO_BINARY, message));
    }
    let mut variables = BTreeMap::new();
    let is_stored = |space| matches!(space, VariableSpace::Global | VariableSpace::Constant);
    for variable in module.variables.iter().filter(|variable| is_stored(variable.space)) {
        let constant = variable.space == VariableSpace::Constant;
        let mut value = variable.initializer.clone().unwrap_or_default().bytes;
        value.resize(variable.size, 0);
        let address = device.memory.allocate_variable(&value, constant);
        variables.insert(variable.name.clone(), (address, variable.size));
    }
    let mut addresses: HashMap<String, u64> =
        variables.iter().map(|(name, &(address, _))| (name.clone(), address)).collect();
    // Functions have no addresses: a pointer to one cannot be called, only stored.
    addresses.extend(module.functions.iter().map(|function| (function.name.clone(), 0)));
    for variable in &module.variables {
        for (offset, name) in variable.initializer.iter().flat_map(|value| &value.addresses) {
            let target = addresses.get(name);
            let target =
                target.ok_or((DriverErrorCode::INVALID_PTX, format!("unknown name: {name}")))?;
            if let Some(&(address, _)) = variables.get(&variable.name) {
                // The variable was allocated above, so the address is inside of it.
                let _ = device.memory.copy_in(address + *offset as u64, &target.to_le_bytes());
            }
        }
    }
    let program = match link(&module, &addresses) {
        Ok(program) => Arc::new(program),
        Err(error) => {
            for (address, _) in variables.values() {
                device.memory.free(*address);
            }
            return Err(invalid(error));
        }
    };
    Ok(LoadedModule { context, program, variables, functions: BTreeMap::new() })
}
