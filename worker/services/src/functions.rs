//! The functions that a server offers.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use pushpull_common::error::Chain;
use pushpull_common::protocol::limits;

use super::coordinator::decisions::is_transient;
use super::error::ServiceError;
use super::function_table::{FunctionFacts, FunctionTable};
use super::invocation::Invocation;
use super::outputs::Outputs;
use super::signature::Signature;

/// The failure of a function, final or worth another execution.
///
/// Every error type of Rust converts to it by `?`. The failure ends the call and is final, unless
/// it is [`FunctionError::retryable`]: then a coordinator runs the function again. The error of a
/// nested call is retryable if a coordinator would repeat that call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionError {
    detail: String,
    retry: bool,
}

impl FunctionError {
    /// Creates an error with this text. Callers see at most 512 bytes of it: the start and the end
    /// of a longer text.
    pub fn new(detail: impl Into<String>) -> FunctionError {
        FunctionError { detail: detail.into(), retry: false }
    }

    /// Marks the error as retryable: another execution may succeed, for example on another worker.
    pub fn retryable(self) -> FunctionError {
        FunctionError { retry: true, ..self }
    }

    pub(crate) fn into_parts(self) -> (String, bool) {
        (self.detail, self.retry)
    }
}

impl fmt::Display for FunctionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

// No `Error` of its own, because then every other error could not become one by `?`.
impl<E: std::error::Error + 'static> From<E> for FunctionError {
    fn from(error: E) -> FunctionError {
        let as_any: &(dyn std::error::Error + 'static) = &error;
        let nested = as_any.downcast_ref::<ServiceError>();
        FunctionError { detail: Chain(&error).to_string(), retry: nested.is_some_and(is_transient) }
    }
}

/// The result of a function's body.
pub(crate) type FunctionResult = Result<Outputs, FunctionError>;

/// The future of an asynchronous function.
pub(crate) type FunctionFuture = Pin<Box<dyn Future<Output = FunctionResult> + Send>>;

/// The body of a function.
#[derive(Clone)]
pub(crate) enum Body {
    /// The body runs on a thread of the server's pool.
    Blocking(Arc<dyn Fn(&mut Invocation) -> FunctionResult + Send + Sync>),
    /// The body runs as a future on the server's own thread, which it must not block.
    Asynchronous(Arc<dyn Fn(Invocation) -> FunctionFuture + Send + Sync>),
}

/// A function with its signature.
#[derive(Clone)]
struct Function {
    signature: Option<Signature>,
    body: Body,
}

/// The functions that a server offers, by name.
///
/// No code travels: a client names a function, and the server runs the one that it was started
/// with. Servers that are called for the same work register the same functions.
///
/// ```
/// use pushpull_common::tensor::DType;
/// use pushpull_services::{Functions, Signature};
///
/// let square = Signature::new().input("x", DType::F32, [None]).output("value", DType::F32, []);
/// let functions = Functions::new()
///     .add("hello", |_| Ok("Hello!"))
///     .add("sum", |call| call.zip(["a", "b"], |a: f32, b| a + b))
///     .typed("square", square, |call| {
///         Ok(call.feed::<f32>("x")?.iter().map(|x| x * x).sum::<f32>())
///     });
/// assert_eq!(functions.names(), ["hello", "square", "sum"]);
/// ```
#[derive(Clone, Default)]
pub struct Functions {
    functions: BTreeMap<String, Function>,
}

impl Functions {
    /// Returns an empty set of functions.
    pub fn new() -> Functions {
        Functions::default()
    }

    /// Adds a function that takes any inputs. It runs on a thread of the server's pool, so it may
    /// compute or wait for any length of time. A panic is an error of the call.
    ///
    /// # Panics
    /// If the name is empty or longer than 128 bytes, or there is a function of this name.
    pub fn add<O: Into<Outputs>>(
        self,
        name: &str,
        body: impl Fn(&mut Invocation) -> Result<O, FunctionError> + Send + Sync + 'static,
    ) -> Functions {
        self.insert(name, None, blocking(body))
    }

    /// Adds a function with a signature, which runs like those of [`Functions::add`].
    ///
    /// # Panics
    /// Under the conditions of [`Functions::add`].
    pub fn typed<O: Into<Outputs>>(
        self,
        name: &str,
        signature: Signature,
        body: impl Fn(&mut Invocation) -> Result<O, FunctionError> + Send + Sync + 'static,
    ) -> Functions {
        self.insert(name, Some(signature), blocking(body))
    }

    /// Adds an asynchronous function. It runs on the server's own thread, which costs no wake-up of
    /// another thread. It must not block that thread, nor compute for long.
    ///
    /// # Panics
    /// Under the conditions of [`Functions::add`].
    pub fn add_async<O, F>(
        self,
        name: &str,
        body: impl Fn(Invocation) -> F + Send + Sync + 'static,
    ) -> Functions
    where
        O: Into<Outputs>,
        F: Future<Output = Result<O, FunctionError>> + Send + 'static,
    {
        self.insert(name, None, asynchronous(body))
    }

    /// Adds an asynchronous function with a signature, which runs like those of
    /// [`Functions::add_async`].
    ///
    /// # Panics
    /// Under the conditions of [`Functions::add`].
    pub fn typed_async<O, F>(
        self,
        name: &str,
        signature: Signature,
        body: impl Fn(Invocation) -> F + Send + Sync + 'static,
    ) -> Functions
    where
        O: Into<Outputs>,
        F: Future<Output = Result<O, FunctionError>> + Send + 'static,
    {
        self.insert(name, Some(signature), asynchronous(body))
    }

    /// Adds the functions `add`, `mul` and `div` of two tensors `a` and `b`, `mean` of any number
    /// of tensors, and `identity` of any values. They take and return tensors of f32 and f64, and
    /// scalars combine with each element.
    ///
    /// # Panics
    /// If there is a function of one of these names.
    pub fn elementwise(self) -> Functions {
        super::elementwise::add_to(self)
    }

    /// Adds the function `apply_towers`, with which [`super::Towers`] updates the variables.
    ///
    /// # Panics
    /// If there is a function of this name.
    pub fn towers(self) -> Functions {
        super::towers::add_to(self)
    }

    /// Returns the names of the functions, sorted.
    pub fn names(&self) -> Vec<&str> {
        self.functions.keys().map(String::as_str).collect()
    }

    fn insert(mut self, name: &str, signature: Option<Signature>, body: Body) -> Functions {
        let bytes_max = limits::FUNCTION_NAME_BYTES_MAX;
        assert!(
            !name.is_empty() && name.len() <= bytes_max,
            "the name of a function has 1 to {bytes_max} bytes: {name:?}"
        );
        let old = self.functions.insert(name.to_owned(), Function { signature, body });
        assert!(old.is_none(), "there is a function {name:?} already");
        self
    }

    /// Returns the body of a function.
    pub(crate) fn body(&self, name: &str) -> Option<&Body> {
        self.functions.get(name).map(|function| &function.body)
    }

    /// Returns the signatures and kinds of the functions, for the service of a server.
    pub(crate) fn table(&self) -> FunctionTable {
        let facts = |function: &Function| FunctionFacts {
            signature: function.signature.clone(),
            blocking: matches!(function.body, Body::Blocking(_)),
        };
        let all = self.functions.iter();
        FunctionTable::new(all.map(|(name, function)| (name.clone(), facts(function))).collect())
    }
}

fn blocking<O: Into<Outputs>>(
    body: impl Fn(&mut Invocation) -> Result<O, FunctionError> + Send + Sync + 'static,
) -> Body {
    Body::Blocking(Arc::new(move |call| body(call).map(Into::into)))
}

fn asynchronous<O, F>(body: impl Fn(Invocation) -> F + Send + Sync + 'static) -> Body
where
    O: Into<Outputs>,
    F: Future<Output = Result<O, FunctionError>> + Send + 'static,
{
    Body::Asynchronous(Arc::new(move |call| {
        let outputs = body(call);
        Box::pin(async move { outputs.await.map(Into::into) })
    }))
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Functions").field(&self.names()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_become_texts_with_their_causes() {
        let error: FunctionError = "x".parse::<u32>().unwrap_err().into();
        assert_eq!(error.to_string(), "invalid digit found in string");
        let io = std::io::Error::other("disk is gone");
        assert_eq!(FunctionError::from(io).into_parts(), ("disk is gone".to_owned(), false));
        let again = FunctionError::new("busy").retryable();
        assert_eq!(again.into_parts(), ("busy".to_owned(), true));
    }

    #[test]
    #[should_panic = "there is a function \"f\" already"]
    fn a_name_is_given_once() {
        let _ = Functions::new().add("f", |_| Ok(())).add_async("f", |_| async { Ok(()) });
    }
}
