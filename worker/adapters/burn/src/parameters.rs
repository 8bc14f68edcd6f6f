//! The parameters of a module, by their paths.

use std::collections::BTreeMap;

use burn_core::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn_core::tensor::{DType, Tensor, TensorData};
use burn_optim::GradientsParams;
use pushpull::{Gradients, Params};

use crate::elements::{dtype_of, elements, with_element};
use crate::error::AdapterError;

/// The path of the parameter that is visited.
#[derive(Debug, Default)]
struct Path(Vec<String>);

impl Path {
    fn name(&self) -> String {
        self.0.join(".")
    }
}

/// A parameter of a module, with its values.
#[derive(Clone, Debug)]
pub(crate) struct ModuleParameter {
    pub(crate) shape: Vec<u64>,
    pub(crate) dtype: DType,
    /// Whether gradients train it. Otherwise it is a running statistic, or frozen.
    pub(crate) is_trained: bool,
    pub(crate) values: TensorData,
}

/// Returns the parameters of a module by their names, in order.
pub(crate) fn parameters<M: Module>(
    module: &M,
) -> Result<BTreeMap<String, ModuleParameter>, AdapterError> {
    let mut reader = ParameterReader { path: Path::default(), found: Ok(BTreeMap::new()) };
    module.visit(&mut reader);
    reader.found
}

struct ParameterReader {
    path: Path,
    found: Result<BTreeMap<String, ModuleParameter>, AdapterError>,
}

impl ModuleVisitor for ParameterReader {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.0.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.0.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Ok(found) = &mut self.found else { return };
        let name = self.path.name();
        let tensor = param.val();
        let dtype = tensor.dtype();
        let mut add = || {
            if dtype_of(dtype).is_none() {
                return Err(AdapterError::DType { name: name.clone(), dtype });
            }
            let shape = tensor.dims().iter().map(|&extent| extent as u64).collect();
            let is_trained = tensor.is_require_grad();
            let values = read(&name, tensor.clone())?;
            let parameter = ModuleParameter { shape, dtype, is_trained, values };
            match found.insert(name.clone(), parameter) {
                None => Ok(()),
                Some(_) => Err(AdapterError::Twice { name: name.clone() }),
            }
        };
        if let Err(error) = add() {
            self.found = Err(error);
        }
    }
}

/// Returns a module with the values of all variables.
pub(crate) fn load<M: Module>(module: M, params: &Params) -> Result<M, AdapterError> {
    let mut loader = ParameterLoader { path: Path::default(), params, result: Ok(()) };
    let module = module.map(&mut loader);
    loader.result.map(|()| module)
}

struct ParameterLoader<'a> {
    path: Path,
    params: &'a Params,
    result: Result<(), AdapterError>,
}

impl ModuleMapper for ParameterLoader<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.0.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.0.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.result.is_err() {
            return param;
        }
        let name = self.path.name();
        let dtype = param.val().dtype();
        let values = with_element!(dtype, T => {
            self.params.view::<T>(&name).map(|values| TensorData::new(values.to_vec(), param.dims()))
        });
        match values {
            Err(error) => {
                self.result = Err(error.into());
                param
            }
            Ok(values) => param.map(|old| {
                let tensor = Tensor::from_data(values, (&old.device(), dtype));
                tensor.set_require_grad(old.is_require_grad())
            }),
        }
    }
}

/// Copies the gradients of trained parameters to a push, and the values of the others to the
/// replica's own. Returns whether there was a gradient.
pub(crate) fn collect<M: Module>(
    module: &M,
    gradients: GradientsParams,
    params: &mut Params,
    out: &mut Gradients,
) -> Result<bool, AdapterError> {
    let mut collector =
        GradientCollector { path: Path::default(), gradients, params, out, result: Ok(false) };
    module.visit(&mut collector);
    collector.result
}

struct GradientCollector<'a> {
    path: Path,
    gradients: GradientsParams,
    params: &'a mut Params,
    out: &'a mut Gradients,
    /// Whether a gradient was found.
    result: Result<bool, AdapterError>,
}

impl GradientCollector<'_> {
    fn add<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Result<bool, AdapterError> {
        let name = self.path.name();
        let tensor = param.val();
        let dtype = tensor.dtype();
        if !tensor.is_require_grad() {
            // The session keeps these for the next step, and gives the chief's to the servers.
            let values = read(&name, tensor)?;
            with_element!(dtype, T => {
                self.params.view_mut::<T>(&name)?.copy_from_slice(elements(&name, &values)?);
            });
            return Ok(false);
        }
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return Ok(false) };
        let values = read(&name, gradient.cast(dtype))?;
        with_element!(dtype, T => {
            self.out.view_mut_unfilled::<T>(&name)?.copy_from_slice(elements(&name, &values)?);
        });
        Ok(true)
    }
}

impl ModuleVisitor for GradientCollector<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.0.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.0.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Ok(found) = self.result else { return };
        self.result = self.add(param).map(|is_gradient| found || is_gradient);
    }
}

/// Reads a tensor from its device.
fn read<const D: usize>(name: &str, tensor: Tensor<D>) -> Result<TensorData, AdapterError> {
    tensor
        .try_into_data()
        .map_err(|error| AdapterError::Read { name: name.to_owned(), reason: format!("{error:?}") })
}
